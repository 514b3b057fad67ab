"""Short timings of pruned models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from headscan.models.loaded_model import LoadedModel
from headscan.steps.prune import model_costs
from headscan.steps.prune.prune_step import Timing


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time two tokens once: no test depends on a time, and the default takes half a second for each model."""
    timed = model_costs._times

    def briefly(models: Sequence[LoadedModel], timing: Timing) -> list[dict[str, float]]:
        return timed(models, replace(timing, rounds=1, new_tokens=2))

    monkeypatch.setattr(model_costs, "_times", briefly)
