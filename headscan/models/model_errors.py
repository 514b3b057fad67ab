"""Errors of a model's own code, as opposed to missing memory."""

from __future__ import annotations

from headscan.errors import HeadscanError
from headscan.models.out_of_memory import is_out_of_memory

#: What a model's code raises for a kind of call that it does not support. Anything else is a bug or a full machine.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    HeadscanError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def raise_if_out_of_memory(problem: Exception) -> None:
    """Raise an out-of-memory error again.

    It must not count as an unsupported call.
    """
    if isinstance(problem, RuntimeError) and is_out_of_memory(problem):
        raise problem


def first_line(problem: Exception) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
