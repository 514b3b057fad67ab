"""The arms of an evaluation: what is silenced in each, and how the arms are named."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records import ArmKind
from analysis.selection import random_heads, rank_heads, select_heads, threshold
from analysis.store import Store
from headscan.errors import InterventionError
from headscan.grid import HeadGrid
from headscan.interventions import HeadMask, HeadRule
from pipelines.identity import ModelIdentity, same_model


@dataclass(frozen=True)
class Arm:
    """One way of running the model.

    Attributes:
        name: Unique in an evaluation: arms of one name silence the same heads.
        silenced: A mask, a rule, or None for the baseline.
        score: The score it was chosen by.
        share: The share of heads that was asked for (a rule silences another one).
        scan_run: The scan that it was chosen from.
    """

    name: str
    kind: ArmKind
    silenced: HeadMask | HeadRule | None = None
    score: str | None = None
    share: float | None = None
    scan_run: str | None = None


BASELINE = Arm("baseline", "baseline")


def mask_arm(heads: Sequence[tuple[int, int]]) -> Arm:
    """An arm for heads named by hand.

    Raises:
        InterventionError: No heads.
    """
    if not heads:
        raise InterventionError("an empty mask silences nothing: name at least one head")
    mask = HeadMask(heads)
    text = " ".join(f"{layer}:{head}" for layer, head in mask.heads)
    if len(text) > 40:
        text = f"of {len(mask.heads)} heads {hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return Arm(f"mask {text}", "mask", mask)


def scored_arms(store: Store, run_id: str, score: str, share: float, *, rule: bool) -> list[Arm]:
    """The arms that one score and share give: a mask, and the rule at the same quantile where wanted.

    Args:
        store, run_id: The scan that heads are ranked and thresholds taken from.
        share: Share of heads to silence, 0 to 1.

    Raises:
        AnalysisError: Unknown score, a share out of range, or the scan lacks the score.
    """
    heads = select_heads(rank_heads(store, run_id, score), share=share)
    label = f"{score} {100 * share:g}% of scan {run_id[:4]}"
    arms = [Arm(f"mask {label}", "mask", HeadMask(heads), score, share, run_id)]
    if rule:
        silenced = HeadRule(score, threshold=threshold(store, run_id, score, share))
        arms.append(Arm(f"rule {label}", "rule", silenced, score, share, run_id))
    return arms


def random_arms(grid: HeadGrid, arms: Sequence[Arm], seeds: int) -> list[Arm]:
    """Random masks of the same sizes as the masks among ``arms``, so many seeds each.

    Raises:
        InterventionError: A negative number of seeds.
    """
    if seeds < 0:
        raise InterventionError(f"--controls {seeds}: give 0 or more random masks")
    sizes = sorted({len(arm.silenced.heads) for arm in arms if isinstance(arm.silenced, HeadMask)})
    return [
        Arm(f"random {size} heads seed {seed}", "random", HeadMask(random_heads(grid.heads(), size, seed)))
        for size in sizes
        for seed in range(seeds)
    ]


def parse_head(text: str) -> tuple[int, int]:
    """A head from ``LAYER:HEAD``.

    Raises:
        InterventionError: It is not written so.
    """
    layer, _, head = text.partition(":")
    if not (layer.isdecimal() and head.isdecimal()):
        raise InterventionError(f"{text!r} is no head: write LAYER:HEAD, for example 3:5")
    return int(layer), int(head)


def find_scan(store: Store, identity: ModelIdentity, prefix: str | None) -> str:
    """The scan to choose heads from: the named one, or the newest finished one of this model.

    Raises:
        InterventionError: The store has none of this model.
        StoreError: There is no store, or no run begins so.
    """
    runs = [store.resolve_run(prefix, "scan")] if prefix else store.runs("scan")
    for run in runs:
        if same_model(identity.columns(), run) and (prefix or run["status"] == "finished"):
            return str(run["run_id"])
    raise InterventionError(
        f"{store.path} has no finished scan of {identity.name} to choose heads from: run `headscan scan` on it first"
    )
