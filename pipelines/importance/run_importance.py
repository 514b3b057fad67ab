"""An importance run: a run over a corpus that measures derivatives of the loss by a gate on every head."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.pipelines.importance.importance_task import (
    MEASURED,
    REDUCTIONS,
    ImportanceItem,
    Reduction,
    measure_importance,
)
from headscan.pipelines.runs.run_options import RunOptions
from headscan.pipelines.scan.run_shards import (
    CorpusRunConfig,
    CorpusRunError,
    CorpusRunResult,
    ShardMeasurement,
    run_corpus,
)


@dataclass(frozen=True)
class ImportanceConfig(CorpusRunConfig):
    """Settings of an importance run, in addition to those of every run over a corpus.

    Attributes:
        reduction: Loss of a sequence: the mean or the sum over its tokens.

    Raises:
        CorpusRunError: A setting is unknown or out of range.
    """

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise CorpusRunError(f"unknown reduction {self.reduction!r}. Choose {' or '.join(REDUCTIONS)}")
        super().__post_init__()
        if self.tokens.min_tokens < 2:
            raise CorpusRunError(
                f"min_tokens={self.tokens.min_tokens} (limit 2, the last one is predicted). Raise `min_tokens`"
            )


def run_importance(config: ImportanceConfig, run: RunOptions) -> CorpusRunResult:
    """Measure the importance of all heads on a corpus into a store.

    Raises:
        ResumeError: The run is unfinished, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: An error of the user; shards stored before stay.
    """
    settings = {"reduction": config.reduction, "measured": MEASURED}
    measurement = ShardMeasurement(
        "importance",
        deciding=settings,
        recorded=settings,
        item_of=lambda shard, rope: ImportanceItem(shard, config.reduction, config.batch_tokens, rope),
        task=measure_importance,
    )
    return run_corpus(config, measurement, run)
