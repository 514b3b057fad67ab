"""Numbers in a report."""

from __future__ import annotations


def number(value: float | None) -> str:
    """Return a number as text; a dash for None.

    It has three decimals, or four digits if it is large.
    """
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Return a share, 0 to 1, in percent."""
    return "–" if share is None else f"{share:.1%}"


def byte_count(count: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
