"""Values of options, read from text. A wrong value fails before anything is imported or read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from headscan.checkpoints.source_folder import check_folder
from headscan.errors import HeadscanError, unknown_name
from headscan.options import Option

#: Larger counts are typing errors, and they overflow in libraries.
_MOST = 2**31 - 1


class ValueProblemError(HeadscanError):
    """A text that is no value of an option."""


def text_type(option: Option, kind: type, *, many: bool) -> Callable[[str], Any]:
    """Return the function that reads a text.

    Args:
        kind: Type of one value: int, float or str.
        many: The text has several values, with commas between them.
    """
    parse_one = _one(option, kind)
    if not many or option.repeated:
        return parse_one
    if option.names is not None:
        return lambda text: _names(option, parse_one, text)
    if kind is str and option.parse is None:
        return _words
    return lambda text: tuple(parse_one(part.strip()) for part in text.split(","))


def _one(option: Option, kind: type) -> Callable[[str], Any]:
    if option.parse is not None:
        return option.parse
    if kind is int:
        return lambda text: _whole(option, text)
    if kind is float:
        return lambda text: _number(option, text)
    if option.names is not None:
        return lambda text: _name(option, text)
    return str


def _whole(option: Option, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueProblemError(f"{text!r} is not a whole number") from None
    most = _MOST if option.most is None else option.most
    if option.least is not None and value < option.least:
        raise ValueProblemError(f"{value} is too small: give at least {option.least}")
    if value > most:
        raise ValueProblemError(f"{value} is too large: give at most {most}")
    return value


def _number(option: Option, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueProblemError(f"{text!r} is not a number") from None
    low = option.above if option.least is None else option.least
    high = option.below if option.most is None else option.most
    assert low is not None and high is not None, f"an option of numbers without limits: {option.help}"
    inside = (low < value if option.least is None else low <= value) and (
        value < high if option.most is None else value <= high
    )
    if math.isnan(value) or not inside:
        least = "more than" if option.least is None else "at least"
        most = "less than" if option.most is None else "at most"
        raise ValueProblemError(f"{text} is out of range: give {least} {low:g} and {most} {high:g}")
    return value


def _name(option: Option, text: str) -> str:
    known = tuple(option.names or ())
    if text not in known:
        raise unknown_name(option.kind, text, known)
    return text


def _names(option: Option, parse_one: Callable[[str], str], text: str) -> tuple[str, ...]:
    """Return comma-separated names, each once. A word of the option's sets expands to several names."""
    if option.sets is not None and text in option.sets:
        return option.sets[text]
    return tuple(dict.fromkeys(parse_one(part.strip()) for part in text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    """Return comma-separated names that only a library can check; at least one."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ValueProblemError(f"{text!r} names nothing: give at least one name")
    return found


def operations(text: str) -> float:
    """Return operations per second, such as 400T or 4e14."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)([GTP]?)(?:FLOP/?[sS]|FLOPS)?", text.strip())
    value = float(found[1]) * {"": 1, "G": 1e9, "T": 1e12, "P": 1e15}[found[2]] if found else 0.0
    if not 1e6 <= value <= 1e21:
        raise ValueProblemError(f"{text!r} is no speed from 1e6 to 1e21 operations per second: write 400T or 4e14")
    return value


def model_source(text: str) -> str:
    """Check a path of a model. Names on the hub are checked when they load."""
    check_folder(text)
    return text


def head(text: str) -> tuple[int, int]:
    """Return a head, written LAYER:HEAD."""
    layer, _, index = text.partition(":")
    if not (layer.isdecimal() and index.isdecimal()):
        raise ValueProblemError(f"{text!r} is not a head: write LAYER:HEAD, for example 3:5")
    at_least_0 = Option("", least=0)
    return _whole(at_least_0, layer), _whole(at_least_0, index)
