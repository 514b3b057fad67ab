"""Report section that compares the scan with another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headscan.analysis.report.numbers.head_data import HeadData, SiteNumbers
from headscan.analysis.report.numbers.measure import Measure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import number

IDENTITY = "comparison"


def comparison_section(scan: Mapping[str, Any], data: HeadData) -> str | None:
    """Return how far the means of each measure moved; None without another scan."""
    if data.compared is None:
        return None
    other = data.compared
    rows = [
        _row(site, measure, len(data.sites) > 1)
        for site in data.sites
        for measure in site.numbers.measures
        if measure.other is not None
    ]
    if not rows:
        return None
    note = (
        f"This scan: {scan['model']} on {scan['corpus']}. The other: run {other['run_id']}, {other['model']} on"
        f" {other['corpus']}. Means over sequences, by head; the map shows the other scan and the difference too."
        " Moved most: the largest difference. Correlation: of the two means over all heads. The distance of whole"
        f" distributions: headscan compare {scan['run_id'][:8]} {other['run_id'][:8]} with the same --store."
    )
    columns = ["measure", "this scan", "other scan", "mean |difference|", "correlation", "moved most: layer.head"]
    return pages.section(
        "Compared with another scan", [pages.paragraph(note, "note"), pages.table(columns, rows)], IDENTITY
    )


def _row(site: SiteNumbers, measure: Measure, several: bool) -> list[str]:
    assert measure.other is not None
    both = np.isfinite(measure.values) & np.isfinite(measure.other)
    own, other = measure.values[both], measure.other[both]
    name = f"{measure.name}, {site.heads.site}" if several else measure.name
    if not both.any():
        return [name, "–", "–", "–", "–", "–"]
    difference = other - own
    most = int(np.abs(difference).argmax())
    row = int(np.flatnonzero(both)[most])
    varied = own.std() > 0 and other.std() > 0
    return [
        name,
        number(float(own.mean())),
        number(float(other.mean())),
        number(float(np.abs(difference).mean())),
        number(float(np.corrcoef(own, other)[0, 1])) if varied else "–",
        f"{site.heads.layer[row]}.{site.heads.head[row]} by {difference[most]:+.3g}",
    ]
