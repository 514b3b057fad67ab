"""KV heads near the edge of a budget, and their damage with real window masks.

An estimate at one head at a time may rank neighbours wrongly. Near the edge that decides, so each head there is
flipped, with all other heads as planned, and the loss is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscan.kv.kept_keys import KeptKeys, Window
from headscan.sizing.window_candidates import KvHead

#: Share of the candidates on each side of the edge, and the fewest and the most heads on each side.
_SHARE, _FEWEST, _MOST = 0.15, 2, 16


def doubtful_heads(order: Sequence[KvHead], count: int) -> tuple[KvHead, ...]:
    """Return the heads around the edge of a plan, in the order of the candidates.

    Args:
        order: Candidates in the order in which they get a window.
        count: Number of candidates with a window.
    """
    side = min(_MOST, max(_FEWEST, round(_SHARE * len(order))))
    return tuple(order[max(0, count - side) : count + side])


def flipped_windows(
    windows: Mapping[KvHead, Window], planned: Sequence[KvHead], flipped: Sequence[KvHead]
) -> list[KeptKeys]:
    """Return the windows of a plan, then the same with each head flipped.

    Args:
        windows: Window of every candidate.
        planned: Candidates with a window.
    """
    sets = [frozenset(planned), *(frozenset(planned) ^ {head} for head in flipped)]
    return [KeptKeys.of([(*head, windows[head]) for head in chosen]) for chosen in sets]
