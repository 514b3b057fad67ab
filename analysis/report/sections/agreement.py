"""Whether the scores agree about which heads are inactive."""

from __future__ import annotations

from headscan.analysis.heads.comparisons import ComparisonError, score_overlap
from headscan.analysis.report.figures.overlap_map import overlap_figure
from headscan.analysis.report.sections import page as pages
from headscan.analysis.schema.views import INACTIVE_QUANTILE
from headscan.analysis.store.store import Store


def agreement_section(store: Store, run_id: str, site: str) -> str | None:
    """The overlap of what the scores' rules would ablate; None where the scan has not two scores to compare."""
    try:
        pairs = score_overlap(store, run_id, INACTIVE_QUANTILE, site=site)
    except ComparisonError:
        return None
    chance = INACTIVE_QUANTILE / (2 - INACTIVE_QUANTILE)
    note = pages.paragraph(
        f"Each score picks the {INACTIVE_QUANTILE:.0%} of (sequence, layer, head) that it finds most inactive. The map"
        " shows, in percent, how much of what either of two scores picks is picked by both; two that have nothing to do"
        f" with each other would share {chance:.0%}. Scores that were not measured, or are the same for all heads,"
        " are left out.",
        "note",
    )
    return pages.section("Do the scores agree?", [note, pages.figure(overlap_figure(pairs), "overlap")])
