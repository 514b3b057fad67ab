"""The curves of a sweep: accuracy over the share of heads silenced, and how many heads each score lets go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.store import Store


class SweepPoint(NamedTuple):
    """A point of a curve; see the comments of the view ``sweep_points``. All but the two counts are 0 to 1."""

    share: float
    arms: int
    zeroed_share: float
    accuracy: float
    baseline: float
    difference: float
    low: float
    high: float
    lowest: float
    highest: float
    questions: int


@dataclass(frozen=True)
class Curve:
    """A curve; see the comments of the view ``score_curves``.

    Attributes:
        kind: ``rule``, ``mask``, ``random_rule`` or ``random_mask``.
        score: None where no score chose the heads.
        points: By growing share of heads really silenced; the baseline is the first.
        removable_share: Share of heads, 0 to 1, at which the accuracy last falls one point below the baseline.
        removable_share_strict: The same of the lower end of the difference's interval.
        area: Mean accuracy, 0 to 1, up to ``area_upto``, a share that all curves of the run reach.
    """

    kind: str
    score: str | None
    points: tuple[SweepPoint, ...]
    removable_share: float
    removable_share_strict: float
    area: float | None
    area_upto: float | None

    @property
    def is_random(self) -> bool:
        """Whether the heads were drawn by chance."""
        return self.kind.startswith("random_")

    @property
    def name(self) -> str:
        """What chose the heads."""
        return self.score or ("random" if self.is_random else self.kind)

    @property
    def reach(self) -> float:
        """The largest share of heads that was really silenced, 0 to 1."""
        return self.points[-1].zeroed_share


def read_curves(store: Store, run_id: str) -> list[Curve]:
    """The curves of an evaluate run whose arms were compared, those that let most heads go first, random ones last."""
    points: dict[tuple[str, str | None], list[SweepPoint]] = defaultdict(list)
    for row in store.query(
        f"SELECT kind, score, {', '.join(SweepPoint._fields)} FROM sweep_points WHERE run_id = ?"
        " ORDER BY zeroed_share, share",
        [run_id],
    ).to_pylist():
        points[row.pop("kind"), row.pop("score")].append(SweepPoint(**row))
    curves = store.query(
        "SELECT kind, score, removable_share, removable_share_strict, area, area_upto FROM score_curves"
        " WHERE run_id = ? ORDER BY starts_with(kind, 'random_'), removable_share DESC, area DESC, kind, score",
        [run_id],
    ).to_pylist()
    return [Curve(**row, points=tuple(points[row["kind"], row["score"]])) for row in curves]


def is_sweep(curves: Sequence[Curve]) -> bool:
    """Whether there is a curve to draw: two shares or more beside the baseline."""
    return any(len(curve.points) > 2 for curve in curves)


def controls_of(kind: str) -> str:
    """The kind of the random arms that a rule or mask is held against."""
    return f"random_{kind}"
