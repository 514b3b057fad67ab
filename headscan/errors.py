"""What a user can get wrong. Each message names the value, the limit and the mend, and fits one line."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadscanError(Exception):
    """Base of all errors that a user can mend; the command line prints it as one line.

    Attributes:
        exit_code: What the command line ends with.
    """

    exit_code = 2


class ModelLoadError(HeadscanError):
    """A model or tokenizer is missing, is not of text, or cannot be loaded."""


class UnsupportedModelError(HeadscanError):
    """The model loads, but its heads cannot be measured rightly."""


class UnknownNameError(HeadscanError):
    """A score or statistic that the catalogue lacks."""


class HeadIndexError(HeadscanError):
    """A head that the model lacks."""


class SequenceError(HeadscanError):
    """Token ids or lengths that cannot be measured: wrong shape, empty, or longer than the context."""


class InterventionError(HeadscanError):
    """A mask or rule that cannot be applied as asked."""


class NotFiniteError(HeadscanError):
    """A statistic came out as NaN or infinite."""


class MemoryLimitError(HeadscanError):
    """Not even one sequence fits into memory."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not among the ``known`` ones; it proposes the nearest."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.4) or known
    return UnknownNameError(f"unknown {kind} {name!r}; did you mean {', '.join(near)}?")
