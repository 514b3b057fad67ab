"""Part of a report on the agreement of scores about inactive heads."""

from __future__ import annotations

from headscan.analysis.report.figures.profile_charts import overlap_figure
from headscan.analysis.report.numbers.head_data import Picks
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.schema.views import INACTIVE_QUANTILE


def agreement_parts(picks: Picks) -> list[str]:
    """Return the overlap of the heads that rules ablate; empty with fewer than two scores."""
    pairs = picks.overlaps()
    if not pairs.num_rows:
        return []
    chance = INACTIVE_QUANTILE / (2 - INACTIVE_QUANTILE)
    note = pages.paragraph(
        f"Each score picks the {INACTIVE_QUANTILE:.0%} of (sequence, layer, head) that is most inactive. The map shows"
        " the intersection over union of each pair of scores, in percent; two independent scores would share"
        f" {chance:.0%}. Scores that were not measured, or are equal for all heads, are left out.",
        "note",
    )
    return [pages.heading("Do the scores agree?"), note, pages.figure(overlap_figure(pairs), "overlap")]
