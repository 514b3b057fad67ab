"""Search for the set of KV heads with windows: estimates order them, losses with real window masks decide at the edge.

An estimate at one head at a time may rank neighbours wrongly, and the losses of several windows do not add up. So each
head near the budget's edge is flipped, with all others as they are; the best exchanges are measured, and the best one
of them is made, as long as that lowers the loss by more than its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headscan.kv.kept_keys import KeptKeys, Window
from headscan.sizing.window_candidates import KvHead

#: Share of the candidates on each side of the edge, and the fewest and the most heads on each side.
_SHARE, _FEWEST, _MOST = 0.15, 4, 16
#: Most exchanges that are made one after another, and most that are measured for each.
_ROUNDS, _TRIES = 3, 6

#: KV heads with a window.
Heads = frozenset[KvHead]
#: Loss increase of each prompt by task, text first.
Increases = dict[str, np.ndarray]


@dataclass
class WindowSearch:
    """A search among sets of windows; each set is measured once.

    Attributes:
        measure: Returns the loss increases of sets of windows.
        windows: Window of every candidate.
        totals: Sums of all candidates' damage on text and on recall prompts; increases count as shares of them.
        kinds: What a candidate's cache costs; only heads of one kind are exchanged, so bytes stay the same.
        reference: A set by another method. The search ends with it, unless a set loses clearly less, and no more on
            any task. None sets no such limit.
    """

    measure: Callable[[Sequence[KeptKeys]], list[Increases]]
    windows: Mapping[KvHead, Window]
    totals: tuple[float, float]
    kinds: Mapping[KvHead, object]
    reference: Heads | None = None
    _known: dict[Heads, Increases] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        """Number of sets that were measured."""
        return len(self._known)

    def best(self, order: Sequence[KvHead], count: int) -> Heads:
        """Return the best set of ``count`` heads that the search finds.

        Args:
            order: Candidates in the order in which they get a window by their estimates.
        """
        starts = [frozenset(order[:count])]
        if self.reference is not None and self._same_bytes(starts[0], self.reference):
            starts.append(self.reference)
        else:
            self.reference = None
        self._losses(starts)
        chosen = min(starts, key=self.value)
        for _ in range(_ROUNDS):
            exchanged = self._exchanges(chosen, edge(order, chosen))
            self._losses(exchanged)
            better = [heads for heads in exchanged if self._clearly_better(heads, chosen)]
            if not better:
                break
            chosen = min(better, key=self._rank)
        if self.reference is None or self._beats_reference(chosen):
            return chosen
        sets = [heads for heads in self._known if self._same_bytes(heads, chosen) and self._beats_reference(heads)]
        return min(sets, key=self.value, default=self.reference)

    def flips(self, chosen: Heads, heads: Sequence[KvHead]) -> list[tuple[float, ...]]:
        """Return the damage of each head on text, and on recall prompts, with all others as in ``chosen``."""
        found = self._losses([chosen, *(chosen ^ {head} for head in heads)])
        before, *after = (means(each) for each in found)
        return [
            tuple((b - a) if head in chosen else (a - b) for b, a in zip(before, each, strict=True))
            for head, each in zip(heads, after, strict=True)
        ]

    def value(self, heads: Heads) -> float:
        """Return the loss increase of a measured set, as a share of all damage, text and recall prompts together."""
        return sum(each / total for each, total in zip(means(self._known[heads]), self.totals, strict=False))

    def excess(self, heads: Heads) -> float:
        """Return by how much a measured set loses more than the reference on single tasks, in the same shares."""
        if self.reference is None:
            return 0.0
        ours, theirs = self._known[heads], self._known[self.reference]
        more = [max(0.0, float((ours[task] - theirs[task]).mean())) for task in ours]
        return more[0] / self.totals[0] + sum(more[1:]) / self.totals[1]

    def _beats_reference(self, heads: Heads) -> bool:
        """Return True if a set loses clearly less than the reference, and no more on any task."""
        assert self.reference is not None
        return not self.excess(heads) and self._clearly_better(heads, self.reference)

    def _rank(self, heads: Heads) -> tuple[float, float]:
        return self.excess(heads), self.value(heads)

    def _losses(self, sets: Sequence[Heads]) -> list[Increases]:
        new = [heads for heads in dict.fromkeys(sets) if heads not in self._known]
        kept = [KeptKeys.of([(*head, self.windows[head]) for head in heads]) for heads in new]
        self._known |= dict(zip(new, self.measure(kept) if new else [], strict=True))
        return [self._known[heads] for heads in sets]

    def _exchanges(self, chosen: Heads, doubtful: Sequence[KvHead]) -> list[Heads]:
        """Return sets in which heads have changed sides, the most promising ones by the flips of single heads."""
        self._losses([chosen, *(chosen ^ {head} for head in doubtful)])
        value = {head: self.value(chosen ^ {head}) for head in doubtful}
        pairs = sorted(
            (value[out] + value[new], out, new)
            for out in doubtful
            for new in doubtful
            if out in chosen and new not in chosen and self.kinds[out] == self.kinds[new]
        )
        apart: list[tuple[KvHead, KvHead]] = []
        for _, out, new in pairs:
            if not any(out == other[0] or new == other[1] for other in apart):
                apart.append((out, new))
        # The best pairs together, then single pairs.
        sets = [chosen.symmetric_difference(head for pair in apart[:n] for head in pair) for n in (1, 2, 3)]
        sets += [chosen ^ {out, new} for _, out, new in pairs]
        return list(dict.fromkeys(sets))[:_TRIES] if pairs else []

    def _clearly_better(self, heads: Heads, chosen: Heads) -> bool:
        """Return True if a set's loss is lower by more than the standard error over the prompts."""
        now, before = self._known[heads], self._known[chosen]
        text, *recall = ((before[task] - now[task]) for task in now)
        parts = [(text, self.totals[0]), *((each, self.totals[1] * len(recall)) for each in recall)]
        gain = sum(float(each.mean()) / total for each, total in parts)
        variance = sum(float(each.var(ddof=1)) / len(each) / total**2 for each, total in parts if len(each) > 1)
        return gain > math.sqrt(variance)

    def _same_bytes(self, first: Collection[KvHead], second: Collection[KvHead]) -> bool:
        ours, theirs = (sorted(map(repr, (self.kinds[head] for head in heads))) for heads in (first, second))
        return ours == theirs


def edge(order: Sequence[KvHead], chosen: Heads) -> tuple[KvHead, ...]:
    """Return the heads around the edge of a set: its last ones in the order, and the first ones outside."""
    side = min(_MOST, max(_FEWEST, round(_SHARE * len(order))))
    inside, outside = ([head for head in order if (head in chosen) == within] for within in (True, False))
    return (*inside[-side:], *outside[:side])


def means(increases: Increases) -> tuple[float, ...]:
    """Return the mean loss increase on text, and over the recall tasks if there are any."""
    text, *recall = (float(values.mean()) for values in increases.values())
    return (text, sum(recall) / len(recall)) if recall else (text,)
