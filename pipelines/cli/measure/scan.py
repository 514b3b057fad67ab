"""measure every attention head on a corpus

    headscan scan MODEL --corpus texts/ --store s.duckdb
    headscan scan MODEL --corpus data.parquet --column text --mode chunk --panel full

The same command again resumes an interrupted scan, and does nothing if the scan is complete.
"""

from __future__ import annotations

import argparse

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK, PANELS, PROFILES, STATISTICS
from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared import text_options as corpus_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    corpus_options.add_sequences(parser)
    measure = parser.add_argument_group("statistics")
    choice = measure.add_mutually_exclusive_group()
    choice.add_argument(
        "--panel",
        choices=PANELS,
        default="fast",
        help="fast: statistics from fused attention; full: also statistics and profiles that need the attention "
        "weights (default: fast)",
    )
    choice.add_argument(
        "--statistics",
        type=arguments.names("statistic", (*STATISTICS, *PROFILES)),
        default=(),
        help=f"comma-separated statistics instead of a panel: {', '.join((*STATISTICS, *PROFILES))}",
    )
    measure.add_argument(
        "--keep-nonfinite",
        action="store_true",
        help="NaN and infinite values stored as NULL (default: such a value ends the scan)",
    )
    measure.add_argument(
        "--sink",
        type=arguments.count,
        default=DEFAULT_SINK,
        help=f"number of first keys that count as the sink (default: {DEFAULT_SINK})",
    )
    measure.add_argument(
        "--recent",
        type=arguments.count,
        default=DEFAULT_RECENT,
        help=f"number of last keys that count as recent (default: {DEFAULT_RECENT})",
    )


def run(options: argparse.Namespace) -> None:
    from headscan.attention.attention_request import MassWidths
    from headscan.pipelines.runs.run_options import RunOptions
    from headscan.pipelines.scan.run_scan import ScanConfig, ScanResult, scan

    def measure(config: ScanConfig, run: RunOptions) -> ScanResult:
        result = scan(config, run)
        if result.nonfinite_rows:
            run.say(
                f"{result.nonfinite_rows} rows of head_statistics hold values that came out as NaN or infinite: NULL "
                "there"
            )
        return result

    corpus_options.measure_corpus(
        options,
        ScanConfig,
        measure,
        panel=options.panel,
        statistics=options.statistics,
        keep_nonfinite=options.keep_nonfinite,
        widths=MassWidths(options.sink, options.recent),
    )
