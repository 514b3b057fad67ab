"""The finished arms of an evaluate run: its baseline, and the arms to be held against it."""

from __future__ import annotations

from typing import NamedTuple

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.errors import VerdictError
from headscan.analysis.store.store import Store


class FinishedArm(NamedTuple):
    """An arm whose answers are all there; see the comments of the table ``arms``."""

    arm_id: str
    name: str
    kind: ArmKind
    score: str | None
    selection: str | None
    share: float | None
    zeroed_share: float | None


class FinishedArms(NamedTuple):
    """The baseline of a run and its other finished arms, random ones last; ``unfinished`` counts the rest."""

    baseline: FinishedArm
    others: tuple[FinishedArm, ...]
    unfinished: int


def can_be_judged(store: Store, run_id: str) -> bool:
    """Whether a run has a finished baseline and another finished arm."""
    kinds = store.query("SELECT kind FROM arms WHERE run_id = ? AND status = 'finished'", [run_id])["kind"].to_pylist()
    return kinds.count(ArmKind.BASELINE) == 1 and len(kinds) > 1


def finished_arms(store: Store, run_id: str) -> FinishedArms:
    """The finished arms of a run.

    Raises:
        VerdictError: Not exactly one finished baseline.
    """
    rows = store.query(
        f"SELECT {', '.join(FinishedArm._fields)}, status = 'finished' AS finished FROM arms WHERE run_id = ?"
        " ORDER BY starts_with(kind, 'random_'), started_at, name",
        [run_id],
    ).to_pylist()
    arms = [FinishedArm(**row | {"kind": ArmKind(row["kind"])}) for row in rows if row.pop("finished")]
    baselines = [arm for arm in arms if arm.kind is ArmKind.BASELINE]
    if len(baselines) != 1:
        raise VerdictError(
            f"run {run_id} has {len(baselines)} finished baselines; a verdict needs one: finish it with"
            " `headscan evaluate`"
        )
    others = tuple(arm for arm in arms if arm.kind is not ArmKind.BASELINE)
    return FinishedArms(baselines[0], others, len(rows) - len(arms))
