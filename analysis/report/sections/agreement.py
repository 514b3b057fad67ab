"""Report section on the agreement of scores about inactive heads."""

from __future__ import annotations

from headscan.analysis.heads.comparisons import ComparisonError, score_overlap
from headscan.analysis.report.figures.overlap_map import overlap_figure
from headscan.analysis.report.sections import page as pages
from headscan.analysis.schema.views import INACTIVE_QUANTILE
from headscan.analysis.store.store import Store


def agreement_section(store: Store, run_id: str, site: str) -> str | None:
    """Return the overlap of the heads that rules ablate, or None.

    None means that fewer than two scores were measured.
    """
    try:
        pairs = score_overlap(store, run_id, INACTIVE_QUANTILE, site=site)
    except ComparisonError:
        return None
    chance = INACTIVE_QUANTILE / (2 - INACTIVE_QUANTILE)
    note = pages.paragraph(
        f"Each score picks the {INACTIVE_QUANTILE:.0%} of (sequence, layer, head) that is most inactive. The map shows"
        " the intersection over union of each pair of scores, in percent; two independent scores would share"
        f" {chance:.0%}. Scores that were not measured, or are equal for all heads, are left out.",
        "note",
    )
    return pages.section("Do the scores agree?", [note, pages.figure(overlap_figure(pairs), "overlap")])
