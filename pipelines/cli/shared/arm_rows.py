"""Verdicts on arms as rows of plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict

if TYPE_CHECKING:
    from headscan.analysis.verdicts.arm_recall import RecallVerdict


def arm_rows(arms: Iterable[ArmOutcome]) -> list[dict[str, Any]]:
    """Return a row for each arm: its settings, its numbers and its verdict in words."""
    return [arm_row(arm) for arm in arms]


def arm_row(arm: ArmOutcome) -> dict[str, Any]:
    """Return the row of one arm; accuracy and `removable` are None without tasks that have right answers."""
    judged = arm if isinstance(arm, ArmVerdict) else None
    return {
        "arm": arm.name,
        "kind": arm.kind,
        "control": arm.is_control,
        "share": arm.share,
        "zeroed_share": arm.zeroed_share,
        "selection": arm.selection,
        "replacement": arm.replacement,
        "removable": None if judged is None else judged.removable,
        "accuracy": None if judged is None else {k: v for k, v in asdict(judged.paired).items() if k != "retained"},
        "recall": [_recall(family) for family in arm.recall],
        "measures": [asdict(measure) for measure in arm.measures],
        "weights_left": arm.weights_left,
        "cache_left": arm.cache_left,
        "verdict": arm.sentence(),
    }


def _recall(family: RecallVerdict) -> dict[str, Any]:
    return {**asdict(family), "failed": family.failed, "kept": family.kept, "informative": family.informative}
