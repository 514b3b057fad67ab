"""Types of command-line arguments: a wrong value is refused before anything is imported or read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from headscan.errors import HeadscanError, unknown_name

#: Larger counts are slips of the hand, and overflow in the libraries that count with them.
_MOST = 2**31 - 1
#: About four months in seconds: waits that exceed it overflow in threads and locks.
_LONGEST_WAIT = 1e7


class UsageError(HeadscanError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, so that each becomes one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """A type for whole numbers from ``least`` to ``most``."""

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


#: How many of something that there has to be one of.
count = whole(1)


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """A type for numbers from ``low`` to ``high``; ``above`` and ``below`` exclude the ends. NaN is refused."""
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


#: A share of heads to ablate: some, and not all.
share = number(0, 1, above=True, below=True)


def seconds(least: float) -> Callable[[str], float]:
    """A type for times to wait, in seconds."""
    return number(least, _LONGEST_WAIT)


def byte_size(text: str) -> int:
    """A type for sizes in memory, such as 80GiB."""
    from headscan.cluster.placement.byte_sizes import ByteSizeError, parse_bytes

    try:
        return parse_bytes(text)
    except ByteSizeError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def device(text: str) -> str:
    """A type for the names of devices."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"unknown device {text!r}: choose auto, cpu, cuda or cuda:N")
    return text


def head(text: str) -> tuple[int, int]:
    """A type for a head, written LAYER:HEAD."""
    layer, _, index = text.partition(":")
    if not (layer.isdecimal() and index.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a head: write LAYER:HEAD, for example 3:5")
    return whole(0)(layer), whole(0)(index)


def one_name(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    """A type for a name that has to be known; the error proposes the nearest."""
    known = tuple(known)

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(str(unknown_name(kind, text, known)))
        return text

    return parse


def names(
    kind: str, known: Iterable[str], sets: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """A type for known names with commas between, each once; the words in ``sets`` stand for several names."""
    parse_one = one_name(kind, known)

    def parse(text: str) -> tuple[str, ...]:
        if sets is not None and text in sets:
            return sets[text]
        return tuple(dict.fromkeys(parse_one(part.strip()) for part in text.split(",")))

    return parse


def listed(parse_one: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """A type for values with commas between."""

    def parse(text: str) -> tuple[float, ...]:
        return tuple(parse_one(part.strip()) for part in text.split(","))

    return parse


def words(text: str) -> tuple[str, ...]:
    """A type for names with commas between that only a library knows; at least one."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give at least one name")
    return found
