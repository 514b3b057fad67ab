"""Identity and facts of a run's model, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headscan.cluster.tasks.pool import Pool
from headscan.pipelines.runs.identity import ModelFacts, ModelIdentity, model_facts


@dataclass(frozen=True)
class RunContext:
    """The model of a run.

    Attributes:
        identity: Names and hashes; computing them reads the weight files.
        pool: Replicas of the model.
    """

    identity: ModelIdentity
    pool: Pool

    @cached_property
    def facts(self) -> ModelFacts:
        """Grid, dtype and devices of the model, loaded at first access."""
        return self.pool.one(model_facts, None)
