"""The search for the heads of a plan that lose least together, among sets of windows that a function measures.

An estimate at one head at a time may rank neighbours wrongly, and the losses of several windows do not add up. So each
head near the budget's edge is flipped, with all others as they are, and exchanges are tried, on a few of the prompts.
The best exchanges are measured on all prompts, and the best one is made, as long as that lowers the loss by more than
its standard error. In a plan by layer, a "head" is a layer, named by its first KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headscan.windows import KvHead, Window

#: Largest loss of a narrower window, over the mean share of damage of a KV head.
_MARGIN = 0.1


def smallest_windows(damages: Mapping[Window, Sequence[np.ndarray]]) -> list[Window]:
    """Return the narrowest window w of each KV head that costs hardly more than the widest one.

    D(w) - D(widest) <= 0.1 T / C, where D(w) = sum over the T parts (text, recall) of max(d(w), 0) / sum over heads of
    max(d(narrowest), 0). The damage of window w on a part is d(w) (C,).
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


#: Share of the candidates on each side of the edge, and the fewest and the most heads on each side.
_SHARE, _FEWEST, _MOST = 0.1, 4, 16
#: Most exchanges that are made one after another, most that are tried for each on a few prompts, and how many of these
#: are measured on all.
_ROUNDS, _TRIES, _MEASURED = 3, 6, 2
#: Single heads are flipped, and exchanges tried, on one in so many prompts of a task.
SCREENING_PARTS = 4

#: KV heads with a window, or layers by their first KV head.
Heads = frozenset[KvHead]
#: Loss increase of each prompt by task, text first.
Increases = dict[str, np.ndarray]
#: Returns the increases under each set of heads; passes under them go on from those of a set that is alike.
MeasureSets = Callable[[Sequence[Heads], Heads], list[Increases]]


@dataclass
class WindowSearch:
    """A search among sets of windows; each set is measured once on the same prompts.

    Attributes:
        measure: Measures on all prompts.
        screen: Measures on a few of them.
        totals: Sums of all candidates' damage on text and on recall prompts; increases count as shares of them.
        kinds: What a candidate's cache costs; only heads of one kind are exchanged, so bytes stay the same.
        reference: A set by another method. The search ends with it, unless a set loses clearly less, and no more on any
            task. None sets no such limit.
    """

    measure: MeasureSets
    screen: MeasureSets
    totals: tuple[float, float]
    kinds: Mapping[KvHead, object]
    reference: Heads | None = None
    _known: dict[Heads, Increases] = field(default_factory=dict)
    _screened: dict[Heads, Increases] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        return len(self._known)

    @property
    def screened(self) -> int:
        return len(self._screened)

    def best(self, order: Sequence[KvHead], count: int) -> Heads:
        """Return the best set of ``count`` heads found, with the candidates in the order of their estimates."""
        starts = [frozenset(order[:count])]
        if self.reference is not None and self._same_bytes(starts[0], self.reference):
            starts.append(self.reference)
        else:
            self.reference = None
        self._losses(starts, starts[0])
        chosen = min(starts, key=self.value)
        for _ in range(_ROUNDS):
            exchanged = self._exchanges(chosen, edge(order, chosen))
            self._losses(exchanged, chosen)
            better = [heads for heads in exchanged if self._clearly_better(heads, chosen)]
            if not better:
                break
            chosen = min(better, key=lambda heads: (self.excess(heads), self.value(heads)))
        if self.reference is None or self._beats_reference(chosen):
            return chosen
        sets = [heads for heads in self._known if self._same_bytes(heads, chosen) and self._beats_reference(heads)]
        return min(sets, key=self.value, default=self.reference)

    def flips(self, chosen: Heads, heads: Sequence[KvHead]) -> list[tuple[float, ...]]:
        """Return the damage of each head by kind of prompt, with all others as in ``chosen``, on the prompts of
        ``screen``.
        """
        before, *after = map(means, self._tried([chosen, *(chosen ^ {head} for head in heads)], chosen))
        return [
            tuple((b - a) if head in chosen else (a - b) for b, a in zip(before, each, strict=True))
            for head, each in zip(heads, after, strict=True)
        ]

    def value(self, heads: Heads) -> float:
        """Return the loss increase of a measured set, as a share of all damage, text and recall prompts together."""
        return self._share(self._known[heads])

    def _share(self, increases: Increases) -> float:
        return sum(each / total for each, total in zip(means(increases), self.totals, strict=False))

    def excess(self, heads: Heads) -> float:
        """Return by how much a measured set loses more than the reference on single tasks, in the same shares."""
        if self.reference is None:
            return 0.0
        ours, theirs = self._known[heads], self._known[self.reference]
        more = [max(0.0, float((ours[task] - theirs[task]).mean())) for task in ours]
        return more[0] / self.totals[0] + sum(more[1:]) / self.totals[1]

    def _beats_reference(self, heads: Heads) -> bool:
        assert self.reference is not None
        return not self.excess(heads) and self._clearly_better(heads, self.reference)

    def _losses(self, sets: Sequence[Heads], base: Heads) -> None:
        """Measure those sets that are not known."""
        self._measure_new(self.measure, self._known, sets, base)

    def _tried(self, sets: Sequence[Heads], base: Heads) -> list[Increases]:
        """Return the increases on the prompts of ``screen``."""
        self._measure_new(self.screen, self._screened, sets, base)
        return [self._screened[heads] for heads in sets]

    def _measure_new(
        self, measure: MeasureSets, known: dict[Heads, Increases], sets: Sequence[Heads], base: Heads
    ) -> None:
        new = [heads for heads in dict.fromkeys(sets) if heads not in known]
        if new:
            known |= dict(zip(new, measure(new, base), strict=True))

    def _exchanges(self, chosen: Heads, doubtful: Sequence[KvHead]) -> list[Heads]:
        """Return sets with exchanged heads: of those that promise most by flips of single heads, the best on few
        prompts.
        """
        flipped = self._tried([chosen, *(chosen ^ {head} for head in doubtful)], chosen)[1:]
        value = dict(zip(doubtful, map(self._share, flipped), strict=True))
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
        tried = list(dict.fromkeys(sets))[:_TRIES] if pairs else []
        shares = dict(zip(tried, map(self._share, self._tried(tried, chosen)), strict=True))
        return sorted(tried, key=shares.__getitem__)[:_MEASURED]

    def _clearly_better(self, heads: Heads, chosen: Heads) -> bool:
        """Return True if a set's loss is lower by more than the standard error over the prompts, which needs two
        prompts of each task.
        """
        now, before = self._known[heads], self._known[chosen]
        text, *recall = ((before[task] - now[task]) for task in now)
        parts = [(text, self.totals[0]), *((each, self.totals[1] * len(recall)) for each in recall)]
        gain = sum(float(each.mean()) / total for each, total in parts)
        if any(len(each) < 2 for each, _ in parts):
            return False
        variance = sum(float(each.var(ddof=1)) / len(each) / total**2 for each, total in parts)
        return gain > math.sqrt(variance)

    def _same_bytes(self, first: Collection[KvHead], second: Collection[KvHead]) -> bool:
        ours, theirs = (sorted(map(repr, (self.kinds[head] for head in heads))) for heads in (first, second))
        return ours == theirs


def search_passes(candidates: int) -> tuple[float, float]:
    """Return how often a search reads all prompts: in the first round, with two sets to start from, and in all further
    rounds. A pass that goes on from that of a similar set counts as a whole one.
    """
    flipped = 1 + 2 * _side(candidates)
    of_round = (flipped + _TRIES) / SCREENING_PARTS + _MEASURED
    return 2 + of_round, (_ROUNDS - 1) * of_round


def _side(candidates: int) -> int:
    """Return the number of heads on each side of the edge."""
    return min(_MOST, max(_FEWEST, round(_SHARE * candidates)))


def edge(order: Sequence[KvHead], chosen: Heads) -> tuple[KvHead, ...]:
    """Return the heads around the edge of a set: its last ones in the order, and the first ones outside."""
    side = _side(len(order))
    inside, outside = ([head for head in order if (head in chosen) == within] for within in (True, False))
    return (*inside[-side:], *outside[:side])


def means(increases: Increases) -> tuple[float, ...]:
    """Return the mean loss increase on text, and over the recall tasks if there are any."""
    text, *recall = (float(values.mean()) for values in increases.values())
    return (text, sum(recall) / len(recall)) if recall else (text,)
