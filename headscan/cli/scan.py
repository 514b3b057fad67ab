"""The verb scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from headscan.cli.corpus_verb import CorpusVerb, run_result, say_counts
from headscan.cli.option_parser import Given
from headscan.cli.results import Result
from headscan.options import Group
from headscan.settings.measure_settings import ScanConfig


@dataclass(frozen=True, kw_only=True)
class Scan(CorpusVerb):
    """measure every attention head on a corpus

        headscan scan MODEL --corpus texts/ --store s.duckdb
        headscan scan MODEL --corpus data.parquet --column text --mode chunk --panel full
        headscan scan MODEL --corpus texts/ --part 3/8 --store part3.duckdb

    The same command again resumes an interrupted scan, and does nothing if the scan is complete. Jobs that scan parts
    share nothing: each has a store of its own, and `headscan merge` joins them.
    """

    common: ClassVar = (
        "MODEL --corpus --store --max-tokens --mode --limit-sequences --panel --dtype --device --ray-address"
    )

    settings: Annotated[Given[ScanConfig], Group("statistics")]

    def run(self) -> Result:
        from headscan.jobs import job_functions

        config, identity = self.config(self.settings)
        result = job_functions.scan(config, self.store.path, **self.job_options(identity))
        say_counts(result, config.tokens)
        return run_result(result, self.store.path)
