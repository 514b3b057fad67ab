"""Width of each KV head's window, from the damage of several widths.

Shapes: C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headscan.kv.kept_keys import Window

#: Largest loss of a narrower window, over the mean share of damage of a KV head.
_MARGIN = 0.1


def smallest_windows(damages: Mapping[Window, Sequence[np.ndarray]]) -> list[Window]:
    """Return the narrowest window of each KV head that costs hardly more than the widest one.

    Damage is counted in shares: each part over its sum at the narrowest window, summed over the parts. A narrower
    window may cost a tenth of the mean share more.

    Args:
        damages: By window, the damages (C,) on text and on recall prompts.
    """
    windows = sorted(damages, key=lambda window: window.width)
    totals = [np.clip(part, 0, None).sum() or 1.0 for part in damages[windows[0]]]
    shares = {
        window: sum(np.clip(part, 0, None) / total for part, total in zip(damages[window], totals, strict=True))
        for window in windows
    }
    widest = shares[windows[-1]]
    margin = _MARGIN * len(totals) / len(widest)
    return [
        next(window for window in windows if shares[window][index] - widest[index] <= margin)
        for index in range(len(widest))
    ]
