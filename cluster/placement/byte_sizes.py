"""Parse and format sizes in bytes, without heavy imports."""

from __future__ import annotations

import re

from headscan.errors import HeadscanError

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}

#: Larger than any machine: a larger number is a typing error, and would overflow 64 bits in later sums.
_LARGEST = 1 << 60


class ByteSizeError(HeadscanError):
    """A text is not a size in memory."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a size with a unit, such as ``80GiB``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is not None and not found[2]:
        raise ByteSizeError(
            f"{text.strip()!r} has no unit: write {found[1]}GiB for gibibytes, or {found[1]}B for bytes"
        )
    unit = _BY_LOWER.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ByteSizeError(f"{text!r} is not a size in memory: write a number and a unit, such as 80GiB or 500MB")
    size = float(found[1]) * unit
    if not 1 <= size <= _LARGEST:
        raise ByteSizeError(f"{text!r} is out of range: write a size from 1B to {_LARGEST >> 40}TiB, such as 80GiB")
    return int(size)


def format_bytes(size: float) -> str:
    """Return a size as text, such as ``1.5 GiB``."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {letter}iB"
    return f"{size:.0f} B"
