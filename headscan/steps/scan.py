"""The step scan."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import PROFILES, STATISTICS, MassWidths, Panel, check_statistics, panel_names
from headscan.options import Count, Group, Option, check_limits, short
from headscan.steps.corpus_step import CorpusRunError, CorpusStep

if TYPE_CHECKING:
    from headscan.runs.run_context import Run
    from headscan.steps.run_corpus import CorpusRunResult


@dataclass(frozen=True)
class Part:
    """One of ``of`` equal parts of a corpus: every shard whose index is ``number - 1`` modulo ``of``."""

    number: Count
    of: Count

    def __post_init__(self) -> None:
        check_limits(self, CorpusRunError)
        if self.number > self.of:
            raise CorpusRunError(f"`part={self}` (limit 1/{self.of} to {self.of}/{self.of}). Change `part`")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def __contains__(self, shard: int) -> bool:
        return shard % self.of == self.number - 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part that a text such as ``3/8`` names."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise CorpusRunError(f"{text!r} is no part of a corpus: write 1/8 to 8/8 for eight parts")
        return cls(int(match[1]), int(match[2]))


@short
@dataclass(frozen=True)
class Scan(CorpusStep):
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

    panel: Annotated[
        Panel,
        Option(
            "fast: statistics from fused attention; full: also statistics and profiles that need the attention weights",
            one_of="statistics",
        ),
    ] = "fast"
    statistics: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated statistics instead of a panel: {', '.join((*STATISTICS, *PROFILES))}",
            kind="statistic",
            names=(*STATISTICS, *PROFILES),
            one_of="statistics",
        ),
    ] = ()
    keep_nonfinite: Annotated[
        bool, Option("NaN and infinite values stored as NULL (default: such a value ends the scan)")
    ] = False
    widths: Annotated[MassWidths, Group("statistics")] = field(default_factory=MassWidths)
    part: Annotated[
        Part | None,
        Option(
            "part of the corpus, such as 3/8: every eighth shard, from the third on; `headscan merge` joins the stores "
            "of all parts (default: the whole corpus)",
            metavar="N/PARTS",
            parse=Part.parse,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics:
            self.refuse(("panel",), "with `statistics`")

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the measured statistics and profiles, sorted."""
        return tuple(sorted(check_statistics(self.statistics or panel_names(self.panel))))

    def execute(self, run: Run) -> CorpusRunResult:
        from headscan.steps.run_scan import run_scan

        return run_scan(self, run)
