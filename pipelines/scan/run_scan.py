"""A scan: a run over a corpus that measures statistics of every head."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from headscan.analysis.store.store import Store
from headscan.attention.attention_request import MassWidths
from headscan.catalog import PANELS, Panel, panel_names
from headscan.measure.collect import check_statistics
from headscan.pipelines.runs.run_options import RunOptions
from headscan.pipelines.scan.run_shards import (
    CorpusRunConfig,
    CorpusRunError,
    CorpusRunResult,
    ShardMeasurement,
    run_corpus,
)
from headscan.pipelines.scan.shard_task import ShardItem, measure_shard


@dataclass(frozen=True)
class ScanConfig(CorpusRunConfig):
    """Settings of a scan, in addition to those of every run over a corpus.

    Attributes:
        panel: Set of statistics, unless ``statistics`` is given.
        statistics: Names of statistics and profiles; empty uses those of the panel.
        keep_nonfinite: Store NaN and infinite values as NULL instead of ending the scan.
        widths: Widths of sink and recent mass.

    Raises:
        UnknownNameError: A statistic is not in the catalogue.
        CorpusRunError: The panel is unknown, or a size is below 1.
    """

    panel: Panel = "fast"
    statistics: tuple[str, ...] = ()
    keep_nonfinite: bool = False
    widths: MassWidths = field(default_factory=MassWidths)

    def __post_init__(self) -> None:
        if self.panel not in PANELS:
            raise CorpusRunError(f"unknown panel {self.panel!r}. Choose {' or '.join(PANELS)}")
        check_statistics(self.statistics)
        super().__post_init__()

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the measured statistics and profiles, sorted."""
        return tuple(sorted(check_statistics(self.statistics or panel_names(self.panel))))


@dataclass(frozen=True)
class ScanResult(CorpusRunResult):
    """Result of a scan.

    Attributes:
        nonfinite_rows: Rows of the whole run with values stored as NULL because they were NaN or infinite.
    """

    nonfinite_rows: int = 0


def scan(config: ScanConfig, run: RunOptions) -> ScanResult:
    """Scan a corpus into a store.

    Raises:
        ResumeError: The run is unfinished, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: An error of the user; shards stored before stay.
    """
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
