"""Finished arms of an evaluate run."""

from __future__ import annotations

from typing import NamedTuple

from headscan.analysis.arm_kinds import CONTROL_KINDS_SQL, ArmKind
from headscan.analysis.errors import VerdictError
from headscan.analysis.store.store import Store


class FinishedArm(NamedTuple):
    """An arm with all answers; see the comments of the table ``arms``.

    Attributes:
        kv_shares: Share of the KV cache that a plan leaves, by length, as JSON; None for other arms.
        weights_left: Share of the weights' bytes that a pruned model keeps; None for other arms.
        cache_left: Share of the KV cache's bytes that a pruned model keeps; None for other arms.
        layers_dropped: Number of layers whose attention is dropped; None for other arms.
        replacement: What replaces the output of ablated heads; None for other arms.
        seed: Seed of a random arm; None for other arms.
    """

    arm_id: str
    name: str
    kind: ArmKind
    score: str | None
    selection: str | None
    share: float | None
    zeroed_share: float | None
    kv_shares: str | None = None
    weights_left: float | None = None
    cache_left: float | None = None
    layers_dropped: int | None = None
    replacement: str | None = None
    seed: int | None = None


#: Fields in the arm's settings, and their SQL types.
_SETTINGS = {"kv_shares": "VARCHAR", "weights_left": "DOUBLE", "cache_left": "DOUBLE", "layers_dropped": "INTEGER"}


class FinishedArms(NamedTuple):
    """The baseline, the other finished arms (controls last) and the number of unfinished arms."""

    baseline: FinishedArm
    others: tuple[FinishedArm, ...]
    unfinished: int


def can_be_judged(store: Store, run_id: str) -> bool:
    """Return True if a run can be compared with its baseline.

    The baseline and another arm must be finished.
    """
    kinds = store.query("SELECT kind FROM arms WHERE run_id = ? AND status = 'finished'", [run_id])["kind"].to_pylist()
    return kinds.count(ArmKind.BASELINE) == 1 and len(kinds) > 1


def finished_arms(store: Store, run_id: str) -> FinishedArms:
    """Return the finished arms of a run.

    Raises:
        VerdictError: Not exactly one finished baseline.
    """
    columns = [name for name in FinishedArm._fields if name not in _SETTINGS]
    columns += [f"(config ->> '$.{name}')::{kind} AS {name}" for name, kind in _SETTINGS.items()]
    rows = store.query(
        f"SELECT {', '.join(columns)}, status = 'finished' AS finished FROM arms"
        f" WHERE run_id = ? ORDER BY kind IN ({CONTROL_KINDS_SQL}), started_at, name",
        [run_id],
    ).to_pylist()
    arms = [FinishedArm(**row | {"kind": ArmKind(row["kind"])}) for row in rows if row.pop("finished")]
    baselines = [arm for arm in arms if arm.kind is ArmKind.BASELINE]
    if len(baselines) != 1:
        raise VerdictError(
            f"run {run_id} has {len(baselines)} finished baselines (limit 1). Finish the run with `headscan evaluate`"
        )
    others = tuple(arm for arm in arms if arm.kind is not ArmKind.BASELINE)
    return FinishedArms(baselines[0], others, len(rows) - len(arms))
