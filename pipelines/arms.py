"""The arms of an evaluation: what is silenced in each, and how the arms are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records import ArmKind
from analysis.selection import random_heads, rank_heads, select_heads, threshold
from analysis.store import Store
from headscan.errors import InterventionError
from headscan.interventions import HeadMask, HeadRule
from pipelines.identity import ModelIdentity


@dataclass(frozen=True)
class Arm:
    """One way of running the model.

    Attributes:
        name: Unique in an evaluation.
        silenced: A mask, a rule, or None for the baseline.
        score: The score it was chosen by.
        share: The share of heads that was asked for (a rule silences another one).
        control_of: The arm whose random control this is.
    """

    name: str
    kind: ArmKind
    silenced: HeadMask | HeadRule | None = None
    score: str | None = None
    share: float | None = None
    control_of: str | None = None


BASELINE = Arm("baseline", "baseline")


def mask_arm(heads: Sequence[tuple[int, int]]) -> Arm:
    """An arm for heads named by hand.

    Raises:
        InterventionError: No heads.
    """
    if not heads:
        raise InterventionError("an empty mask silences nothing: name at least one head")
    name = "mask " + " ".join(f"{layer}:{head}" for layer, head in sorted(set(heads)))
    return Arm(name if len(name) <= 60 else f"mask of {len(set(heads))} heads", "mask", HeadMask(heads))


def scored_arms(store: Store, run_id: str, score: str, share: float, *, rule: bool, seeds: Sequence[int]) -> list[Arm]:
    """The arms that one score and share give: a mask, the rule at the same quantile, random masks of the mask's size.

    Args:
        store, run_id: The scan that heads are ranked and thresholds taken from.
        share: Share of heads to silence, 0 to 1.
        rule: Whether the rule is wanted.
        seeds: One random control each.

    Raises:
        AnalysisError: Unknown score, a share out of range, or the scan lacks the score.
    """
    ranked = rank_heads(store, run_id, score)
    heads = select_heads(ranked, share=share)
    mask = Arm(f"mask {score} {share:.0%}", "mask", HeadMask(heads), score, share)
    arms = [mask]
    if rule:
        silenced = HeadRule(score, threshold=threshold(store, run_id, score, share))
        arms.append(Arm(f"rule {score} {share:.0%}", "rule", silenced, score, share))
    everything = [(head.layer, head.head) for head in ranked]
    for seed in seeds:
        chosen = random_heads(everything, len(heads), seed)
        arms.append(
            Arm(f"random {len(heads)} heads seed {seed}", "random", HeadMask(chosen), None, share, control_of=None)
        )
    return arms


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
        same = (run["model_config_hash"], run["weights_hash"]) == (identity.config_hash, identity.weights_hash)
        if same and (prefix or run["status"] == "finished"):
            return str(run["run_id"])
    raise InterventionError(
        f"{store.path} has no finished scan of {identity.name} to choose heads from: run `headscan scan` on it first"
    )
