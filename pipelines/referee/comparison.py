"""What a referee compares."""

from __future__ import annotations

from math import floor


def head_count(share: float, total: int) -> int:
    """Return the number of heads of a share, at least 1."""
    return max(1, floor(share * total + 0.5))
