"""Errors of users. Each message names the value, the limit and a fix, on one line."""

import re
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

_V = TypeVar("_V")

#: Most names that an error lists.
_SHOWN_NAMES = 8


class HeadscanError(Exception):
    """Base of all errors that a user can fix; the command line prints them as one line and ends with ``exit_code``."""

    exit_code = 2


class ModelLoadError(HeadscanError):
    """A model or tokenizer is missing, does not read text, or cannot be loaded."""


class UnsupportedModelError(HeadscanError):
    """The model loads, but its heads cannot be measured correctly."""


class UnknownNameError(HeadscanError):
    """No known name of its kind, such as a score, a statistic or an option."""


class HeadIndexError(HeadscanError):
    """The model has no such head."""


class SequenceError(HeadscanError):
    """Token ids or lengths have a wrong shape, are empty or exceed the context."""


class InterventionError(HeadscanError):
    """A mask or rule cannot be applied."""


class PlanMismatchError(HeadscanError):
    """A KV-cache plan contradicts itself, or does not fit the model or the call."""


class PruningError(HeadscanError):
    """Heads cannot be removed as requested, or a pruned model cannot be saved."""


class ExportError(HeadscanError):
    """A model has no place in the format of a serving engine, or its file cannot be written."""


class GateError(HeadscanError):
    """Gates cannot be fitted as requested, or a saved state belongs to another fit."""


class NotFiniteError(HeadscanError):
    """A statistic is NaN or infinite."""


class MemoryLimitError(HeadscanError):
    """One sequence does not fit into memory."""


# Errors of stores, rankings and verdicts.


class StoreError(HeadscanError):
    """The store cannot be opened, read or written."""


class StoreMissingError(StoreError):
    """The path has no store."""


class NotAStoreError(StoreError):
    """The file is not a headscan store."""


class StoreVersionError(StoreError):
    """The store has another schema, or views of another version that cannot be rewritten."""


class StoreChangedError(StoreError):
    """Tables, views or functions of the store differ from the schema."""


class StoreLockedError(StoreError):
    """Another process held the store for longer than the timeout."""


class StoreFullError(StoreError):
    """The store's disk or quota is full; nothing was written."""


class ResumeError(StoreError):
    """Software or device changed since the unfinished run began."""


class MergeError(StoreError):
    """Two stores have other rows of the same run, or are one store."""


class QueryError(HeadscanError):
    """DuckDB refused a query; the message is the first line of DuckDB's."""


class SelectionError(HeadscanError):
    """Heads cannot be ranked or selected."""


class EffectError(HeadscanError):
    """Effects of heads cannot be computed: arms or answers are missing."""


class VerdictError(HeadscanError):
    """Arms cannot be compared: answers are missing or do not pair up."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not in ``known``, with the nearest names, or else the first."""
    known, shown = list(dict.fromkeys(known)), repr(name) if isinstance(name, str) else reprlib.repr(name)
    if near := get_close_matches(str(name), known, n=3):
        return UnknownNameError(f"unknown {kind} {shown}; did you mean {', '.join(near)}?")
    more = f", ... ({len(known)} names)" if len(known) > _SHOWN_NAMES else ""
    return UnknownNameError(f"unknown {kind} {shown}. Choose one of {', '.join(known[:_SHOWN_NAMES])}{more}")


def check_type(name: str, value: object, kinds: Any, to_pass: str, error: type[HeadscanError]) -> None:
    """Raise ``error`` if an argument is of none of these types."""
    if not isinstance(value, kinds):
        given = f" {value[:40]!r}" if isinstance(value, str | bytes) else ""
        raise error(f"`{name}` is of type {type(value).__name__}{given}. Pass {to_pass}")


class NamedValues(dict[str, _V]):
    """Values by name; a missing name raises UnknownNameError with the nearest names or, by ``elsewhere``, the fix."""

    def __init__(self, kind: str, values: Mapping[str, _V], elsewhere: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.kind, self.elsewhere = kind, dict(elsewhere or {})

    def __repr__(self) -> str:
        """Return the names, with the shapes of values that have one."""
        shapes = ((name, getattr(value, "shape", None)) for name, value in self.items())
        listed = [name if shape is None else f"{name} {tuple(shape)}" for name, shape in shapes]
        return f"{type(self).__name__}({', '.join(listed)})"

    def __missing__(self, name: str) -> NoReturn:
        if name in self.elsewhere:
            raise UnknownNameError(f"{self.kind} {name!r} is not among these values. {self.elsewhere[name]}")
        raise unknown_name(self.kind, str(name), [*self, *self.elsewhere])


#: Codes by which libraries colour their messages in a terminal.
TERMINAL_COLOURS = re.compile(r"\x1b\[[\d;]*m")
#: Most characters that a message quotes from another error.
_QUOTED = 300


def first_line(problem: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none. That of another library's error is cut
    to 300 characters.
    """
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return line if isinstance(problem, HeadscanError) else _cut(line)


def one_line(problem: BaseException) -> str:
    """Return an error's message on one line, cut to 300 characters, or its type if it has none."""
    return _cut(" ".join(str(problem).split()) or type(problem).__name__)


def _cut(line: str) -> str:
    line = TERMINAL_COLOURS.sub("", line)
    return line if len(line) <= _QUOTED else line[: _QUOTED - 3] + "..."
