"""Curves of a sweep, their shares within one point and their safe shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from headscan.store.arm_views import with_verdict_rows
from headscan.store.records import RANDOM_KINDS_SQL, ArmKind
from headscan.store.store import Store
from headscan.verdicts.verdict_rows import read_verdict_rows

#: Selection of the arms of a study. It asks for one share after the other and stops at the first failure
#: (`ordered_shares`), so that no question selects a share.
STUDY = "study"


class SweepPoint(NamedTuple):
    """A point of a curve, as in the view ``sweep_points``. Numbers are shares from 0 to 1."""

    share: float
    arms: int
    ablated_share: float
    accuracy: float
    baseline: float
    difference: float
    low: float
    high: float
    lowest: float
    highest: float
    questions: int
    texts: int
    recall_lost: bool
    safe: bool | None


@dataclass(frozen=True)
class Curve:
    """A curve; see the comments of the view ``score_curves``.

    Attributes:
        criterion: None for random heads and masks given by hand.
        selection: Further criterion that chose the heads; None without one, or if unknown.
        points: By growing measured share of ablated heads; the baseline is the first.
        share_within_point: Share of heads, 0 to 1, at which the accuracy last falls one point below the baseline.
        safe_share: Largest tested share, 0 to 1, that is safe together with all smaller tested ones; 0 if the smallest
            is not, None with too few questions. Not corrected for the number of curves.
        area: Mean accuracy, 0 to 1, up to ``area_upto``; None if the curve does not reach it.
        area_upto: Largest nominal share that at least half of the run's curves reach.
    """

    kind: ArmKind
    criterion: str | None
    selection: str | None
    name: str
    points: tuple[SweepPoint, ...]
    share_within_point: float
    safe_share: float | None
    area: float | None
    area_upto: float | None

    @property
    def is_random(self) -> bool:
        return self.kind.is_random

    @property
    def reach(self) -> float:
        """Largest measured share of ablated heads, 0 to 1."""
        return self.points[-1].ablated_share

    @property
    def recall_lost_at(self) -> float | None:
        """Smallest ablated share with lost recall; None if recall is kept."""
        return min((point.ablated_share for point in self.points if point.recall_lost), default=None)

    @property
    def stopped_by_recall(self) -> bool:
        """True if lost recall ends the safe share."""
        if self.recall_lost_at is None or self.safe_share is None:
            return False
        kept = [point.ablated_share for point in self.points if point.ablated_share < self.recall_lost_at]
        return self.safe_share >= max(kept, default=0.0)


def read_curves(store: Store, run_id: str, unrecorded: Sequence[Mapping[str, Any]] | None = None) -> list[Curve]:
    """Return a run's curves by falling share within one point, random ones last. ``unrecorded`` are rows of
    ``arm_verdicts`` that the store lacks, from ``Verdict``; None computes them.
    """
    if unrecorded is None:
        unrecorded = read_verdict_rows(store, run_id).computed
    tables = {"unrecorded": pa.Table.from_pylist([dict(row) for row in unrecorded])} if unrecorded else {}
    views = with_verdict_rows("unrecorded") if unrecorded else ""
    points: dict[tuple[str, str | None, str | None], list[SweepPoint]] = defaultdict(list)
    with store.reading():
        for row in store.query(
            f"{views} SELECT kind, criterion, selection, {', '.join(SweepPoint._fields)} FROM all_sweep_points"
            " WHERE run_id = ? ORDER BY ablated_share, share",
            [run_id],
            tables=tables,
        ).to_pylist():
            points[row.pop("kind"), row.pop("criterion"), row.pop("selection")].append(SweepPoint(**row))
        curves = store.query(
            f"{views} SELECT kind, criterion, selection, share_within_point, safe_share, area, area_upto"
            " FROM all_score_curves WHERE run_id = ?"
            f" ORDER BY kind IN ({RANDOM_KINDS_SQL}), share_within_point DESC, area DESC, kind, criterion, selection",
            [run_id],
            tables=tables,
        ).to_pylist()
    # Pruned models have curves of their own, of more than accuracy.
    curves = [row for row in curves if not ArmKind(row["kind"]).is_pruned]
    selections = defaultdict(set)
    for row in curves:
        selections[row["kind"]].add(row["selection"])
    return [
        Curve(
            **row | {"kind": ArmKind(row["kind"])},
            name=_curve_name(
                ArmKind(row["kind"]), row["criterion"], row["selection"] if len(selections[row["kind"]]) > 1 else None
            ),
            points=tuple(points[row["kind"], row["criterion"], row["selection"]]),
        )
        for row in curves
    ]


def _curve_name(kind: ArmKind, criterion: str | None, selection: str | None) -> str:
    chosen_by = criterion or ("random" if kind.is_random else kind)
    return chosen_by if selection is None else f"{chosen_by}, {selection}"


def is_sweep(curves: Sequence[Curve]) -> bool:
    """Return True if a curve of masks or rules has two or more shares that compete. Those of a study do not."""
    return any(curve.kind.ablates and curve.selection != STUDY and len(curve.points) > 2 for curve in curves)
