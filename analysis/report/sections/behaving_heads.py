"""Report section on the numbers of heads from probes, importance runs and other tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headscan.analysis.report.numbers.head_data import SiteNumbers
from headscan.analysis.report.numbers.measure import Measure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import number

IDENTITY = "behaviours"

_MOST_HEADS = 5


def behaving_heads_section(sites: Sequence[SiteNumbers], runs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the strongest heads by behaviour, importance and other tables; None without any.

    Args:
        runs: Run of each group of measures.
    """
    if not runs:
        return None
    parts = [pages.paragraph("The map above shows each of these for every head.", "note")]
    for group, run in runs.items():
        parts.append(pages.heading(group))
        parts.append(pages.paragraph(f"Run {run['run_id']} of {run['model']}.", "note"))
        rows = [
            [
                measure.name + ("" if len(sites) == 1 else f", {site.heads.site}"),
                *_strongest(site, measure),
            ]
            for site in sites
            for measure in site.numbers.measures
            if measure.group == group
        ]
        parts.append(pages.table(["measure", "highest: layer.head and value", "heads above the limit"], rows, texts=3))
    return pages.section("What heads do", parts, IDENTITY)


def _strongest(site: SiteNumbers, measure: Measure) -> list[str]:
    order = np.argsort(-np.nan_to_num(measure.values, nan=-np.inf), kind="stable")[:_MOST_HEADS]
    heads = [
        f"{site.heads.layer[i]}.{site.heads.head[i]}: {number(float(measure.values[i]))}"
        for i in order
        if np.isfinite(measure.values[i])
    ]
    above = "–"
    if measure.limit is not None:
        above = f"{int((measure.values > measure.limit).sum())} of {len(site.heads)} above {measure.limit:g}"
    return [", ".join(heads), above]
