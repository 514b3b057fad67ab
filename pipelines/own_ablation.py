"""An ablation of your own, evaluated next to random controls on the demo model.

python pipelines/own_ablation.py [folder]

In each layer it ablates the head that writes least on the current input.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import headscan
from headscan.texts import held_out_files, write_task

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LeastOfEachLayer(headscan.ScoredAblation):
    """Ablates, in each layer, the head with the smallest score for the input."""

    score: str = "output_norm"

    @property
    def label(self) -> str:
        return f"least {self.score} of each layer"  # also the name of the arm below

    @property
    def scored_by(self) -> tuple[str, headscan.MassWidths]:
        return self.score, headscan.MassWidths()

    def heads_at(self, site: headscan.AttentionSite, scores_BH: Tensor | None) -> Tensor:
        """Return which heads are ablated in this layer, bool (B, H), by their scores (B, H)."""
        assert scores_BH is not None
        return scores_BH == scores_BH.amin(1, keepdim=True)


# 1. Directly on a model.
lm = headscan.load("demo", device="cpu", dtype="float32")
ids = lm.require_tokenizer()("def area(radius):\n", return_tensors="pt").input_ids
with headscan.intervene(lm, LeastOfEachLayer()) as record:
    lm.model(ids)
print(
    f"{100 * record.ablated_share:g} % of the heads ablated: one of {lm.grid.shape[1]} in each of"
    f" {lm.grid.shape[0]} layers"
)

# 2. As an arm of an evaluation, with 3 random rules of its size (19 can show that a choice is better than chance).
# Replicas, shared prefixes and resuming are those of every arm. The fields of the ablation identify the arm in the
# store.
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "own-ablation")
folder.mkdir(parents=True, exist_ok=True)
task = write_task(folder / "task", held_out_files(), 30, name="which_passage")
ablation = LeastOfEachLayer()
share = 1 / lm.grid.shape[1]
kind = headscan.ArmKind.RULE
arm = headscan.Arm(ablation.label, kind, ablation, ablation.score, share, selection="least of each layer")
arms = [arm, *headscan.random_controls(lm.grid, [arm], 3)]
tasks = headscan.TaskConfig(("which_passage",), str(task))
print(headscan.Evaluate(headscan.ModelSpec("demo"), tasks, recall=None, arms=arms).run(folder / "heads.duckdb"))
