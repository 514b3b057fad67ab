"""A scan: the statistics of all heads on every sequence of a corpus."""

from __future__ import annotations

from dataclasses import asdict

from headscan.pipelines.measure.run_corpus import CorpusRunResult, ShardMeasurement, run_corpus
from headscan.pipelines.measure.shard_task import ShardItem, measure_shard
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.settings.measure_settings import ScanConfig

#: Cost of a sequence of a scan, in forward passes.
_PASSES = 1.5


def scan(config: ScanConfig, run: Run) -> CorpusRunResult:
    """Measure the statistics of all heads on a corpus, and report how many rows have values that are not finite."""
    settings = {"statistics": config.measured, "keep_nonfinite": config.keep_nonfinite}
    widths = asdict(config.widths)
    measurement = ShardMeasurement(
        "scan",
        measure_shard,
        lambda shard, rope: ShardItem(
            shard, config.measured, config.widths, config.batch_tokens, config.keep_nonfinite, rope
        ),
        passes=_PASSES,
        deciding={**settings, "widths": widths},
        recorded={**settings, **widths, "panel": None if config.statistics else config.panel},
    )
    result = run_corpus(config, run, measurement, part=config.part)
    if count := int(run.store.resolve_run(result.run_id, "scan")["nonfinite_rows"]):
        run.say(f"{count} rows of head_statistics hold values that came out as NaN or infinite: NULL there")
    return result
