"""Types of command-line arguments. A wrong value fails before anything is imported or read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from headscan.errors import HeadscanError, unknown_name

V = TypeVar("V")

#: Larger counts are typing errors, and they overflow in libraries.
_MOST = 2**31 - 1
#: About four months in seconds. Longer waits overflow in threads and locks.
_LONGEST_WAIT = 1e7


class UsageError(HeadscanError):
    """A command line that cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, so that each error is one line, and reads no shortened option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Propose near choices; argparse lists all of them."""
        if action.choices is not None and value not in action.choices:
            near = get_close_matches(str(value), list(map(str, action.choices)), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"choose one of {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")


class Flat(argparse.Action):
    """An action that joins lists: ``1,2 3`` gives 1, 2 and 3."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [value for some in values for value in some])


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: give at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large: give at most {most}")
        return value

    return parse


#: A number of things, at least one.
count = whole(1)


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """Return a type for numbers from ``low`` to ``high``.

    ``above`` and ``below`` exclude the ends; NaN fails.
    """
    bounds = f"{'more than' if above else 'at least'} {low:g} and {'less than' if below else 'at most'} {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        inside = (low < value if above else low <= value) and (value < high if below else value <= high)
        if math.isnan(value) or not inside:
            raise argparse.ArgumentTypeError(f"{text} is out of range: give {bounds}")
        return value

    return parse


#: A share of heads to ablate: more than none, less than all.
share = number(0, 1, above=True, below=True)


def seconds(least: float) -> Callable[[str], float]:
    """Return a type for waits in seconds."""
    return number(least, _LONGEST_WAIT)


def byte_size(text: str) -> int:
    """Parse a size in bytes, such as 80GiB."""
    from headscan.cluster.placement.byte_sizes import ByteSizeError, parse_bytes

    try:
        return parse_bytes(text)
    except ByteSizeError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def operations(text: str) -> float:
    """Parse operations per second, such as 400T or 4e14."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)([GTP]?)(?:FLOP/?[sS]|FLOPS)?", text.strip())
    value = float(found[1]) * {"": 1, "G": 1e9, "T": 1e12, "P": 1e15}[found[2]] if found else 0.0
    if not 1e6 <= value <= 1e21:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no speed from 1e6 to 1e21 operations per second: write 400T or 4e14"
        )
    return value


def device(text: str) -> str:
    """Parse the name of a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"unknown device {text!r}: choose auto, cpu, cuda or cuda:N")
    return text


def model(text: str) -> str:
    """Check a path of a model.

    Names on the hub are checked when they load.
    """
    from headscan.checkpoints.source_folder import check_folder

    try:
        check_folder(text)
    except HeadscanError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    return text


def head(text: str) -> tuple[int, int]:
    """Parse a head, written LAYER:HEAD."""
    layer, _, index = text.partition(":")
    if not (layer.isdecimal() and index.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a head: write LAYER:HEAD, for example 3:5")
    return whole(0)(layer), whole(0)(index)


def one_name(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    """Return a type for one name, whose error proposes the nearest."""
    known = tuple(known)

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(str(unknown_name(kind, text, known)))
        return text

    return parse


def names(
    kind: str, known: Iterable[str], sets: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """Return a type for comma-separated names, each once.

    A word in ``sets`` expands to several names.
    """
    parse_one = one_name(kind, known)

    def parse(text: str) -> tuple[str, ...]:
        if sets is not None and text in sets:
            return sets[text]
        return tuple(dict.fromkeys(parse_one(part.strip()) for part in text.split(",")))

    return parse


def listed(parse_one: Callable[[str], V]) -> Callable[[str], tuple[V, ...]]:
    """Return a type for comma-separated values."""

    def parse(text: str) -> tuple[V, ...]:
        return tuple(parse_one(part.strip()) for part in text.split(","))

    return parse


def words(text: str) -> tuple[str, ...]:
    """Parse comma-separated names that only a library can check; at least one."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give at least one name")
    return found
