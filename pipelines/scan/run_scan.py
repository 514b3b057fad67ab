"""A scan: a run over a corpus that measures statistics of every head."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from headscan.analysis.store.store import Store
from headscan.pipelines.runs.run_records import Run
from headscan.pipelines.scan.run_shards import CorpusRunResult, ShardMeasurement, run_corpus
from headscan.pipelines.scan.shard_task import ShardItem, measure_shard
from headscan.pipelines.settings.measure_settings import ScanConfig


@dataclass(frozen=True)
class ScanResult(CorpusRunResult):
    """Result of a scan.

    Attributes:
        nonfinite_rows: Rows of the whole run with values stored as NULL because they were NaN or infinite.
    """

    nonfinite_rows: int = 0


def scan(config: ScanConfig, run: Run) -> ScanResult:
    """Scan a corpus into a store."""
    measurement = ShardMeasurement(
        "scan",
        deciding={
            "statistics": config.measured,
            "keep_nonfinite": config.keep_nonfinite,
            "widths": asdict(config.widths),
        },
        recorded={
            "panel": None if config.statistics else config.panel,
            "statistics": config.measured,
            "keep_nonfinite": config.keep_nonfinite,
            "sink": config.widths.sink,
            "recent": config.widths.recent,
        },
        item_of=lambda shard, rope: ShardItem(
            shard, config.measured, config.widths, config.batch_tokens, config.keep_nonfinite, rope
        ),
        task=measure_shard,
    )
    found = run_corpus(config, measurement, run)
    return ScanResult(**vars(found), nonfinite_rows=_nonfinite_rows(run.store, found.run_id))


def _nonfinite_rows(store: Store, run_id: str) -> int:
    return int(store.resolve_run(run_id, "scan")["nonfinite_rows"])
