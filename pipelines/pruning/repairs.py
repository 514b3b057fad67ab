"""Repairs by name: what is solved again after heads are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headscan.errors import PruningError
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.settings.saving_settings import REPAIRS
from headscan.pruning.calibration import Calibration
from headscan.pruning.repair import DistillConfig, RepairConfig, Target, distill, mean_outputs, repair


@dataclass(frozen=True)
class Repair:
    """A repair.

    Attributes:
        name: Name in `REPAIRS`.
        distill_steps: Gradient steps after the repair; 0 omits them.
    """

    name: str = "o+down"
    distill_steps: int = 0

    def __post_init__(self) -> None:
        if self.name not in REPAIRS:
            raise PruningError(f"unknown repair {self.name!r}. Choose one of {', '.join(REPAIRS)}")
        if self.distill_steps and not self.targets:
            raise PruningError(f"distill={self.distill_steps} without a repair (limit 0). Repair a projection, too")

    @property
    def targets(self) -> tuple[Target, ...]:
        """The projections that are solved again."""
        return REPAIRS[self.name]

    @property
    def is_none(self) -> bool:
        """True if removed heads are replaced by nothing."""
        return self.name == "none"

    @property
    def words(self) -> str:
        """The repair in words."""
        return f"{self.name}, distill {self.distill_steps}" if self.distill_steps else self.name

    def weights(
        self, lm: LoadedModel, calibration: Calibration, removed: Sequence[tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Return new weights by parameter name."""
        if self.name == "mean":
            return mean_outputs(lm, calibration, removed)
        weights = repair(lm, calibration, removed, RepairConfig(self.targets))
        if not self.distill_steps or not weights:
            return weights
        return distill(lm, calibration, removed, weights, DistillConfig(self.distill_steps))
