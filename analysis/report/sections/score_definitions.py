"""Report section with definitions of scores."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.analysis.report.page import html_parts as pages
from headscan.catalog import SCORES, STATISTICS


def definitions_section(scores: Sequence[str]) -> str:
    """Return a table with formula, unit, direction and source of each score."""
    rows = []
    for name in scores:
        score = SCORES.get(name)
        needed = STATISTICS[name if score is None else score.statistic]
        formula = needed.formula if score is None or score.normaliser is None else f"{score.formula}; {needed.formula}"
        unit = needed.unit if score is None or score.normaliser is None else "ratio"
        rows.append([name, formula, unit, score.inactive if score else "–", needed.source])
    return pages.section(
        "Definitions",
        [
            pages.paragraph(
                "For one sequence and one query head: A is the causal softmax, V the value vectors of its KV"
                " head, O = A V its output before the output projection. A layer mean is over all query heads of the"
                " layer, and ratios are taken in each sequence before any averaging.",
                "note",
            ),
            pages.folded(
                f"{len(rows)} scores and statistics",
                pages.table(["name", "formula", "unit", "inactive when", "source"], rows, texts=5),
            ),
        ],
        "definitions",
    )
