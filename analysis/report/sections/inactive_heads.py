"""Report section on inactive heads: how many by which score, and which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headscan.analysis.report.numbers.head_data import SiteNumbers
from headscan.analysis.report.numbers.head_spread import MOSTLY, Persistence, Spread, inactive_counts
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import number, percent
from headscan.analysis.schema.views import INACTIVE_QUANTILE
from headscan.catalog import SCORES

#: Score of the first map, and of the table of inactive heads: on average the best one of the paper.
RANKED_BY = "output_norm_ln"

#: Further columns of that table.
COMPARED = ("output_norm", "first_token_weight", "entropy", "distant_mass", "confidence", "received_max")

_MOST_ROWS = 20

IDENTITY = "inactive"


def inactive_heads_section(sites: Sequence[SiteNumbers]) -> str:
    """Return counts of inactive heads by score, and a table of the heads with the lowest output norm."""
    parts = [
        pages.paragraph(
            f"A head is inactive in a sequence if its score lies beyond the {INACTIVE_QUANTILE:.0%} quantile of all"
            f" (sequence, head) of the scan, so {INACTIVE_QUANTILE:.0%} of these are inactive by definition. The table"
            f" shows on how many heads they concentrate: heads that are inactive in at least {MOSTLY:.0%} of the"
            " sequences. Intervals: 95 %, bootstrap of whole sequences with the threshold fixed. An evaluation shows"
            " whether the model needs them.",
            "note",
        )
    ]
    for site in sites:
        if len(sites) > 1:
            parts.append(pages.heading(f"{site.heads.site} attention"))
        parts += [_counts(site), *_lowest(site)]
    return pages.section("Inactive heads", parts, IDENTITY)


def _counts(site: SiteNumbers) -> str:
    heads = len(site.heads)
    return pages.table(
        ["score", "inactive end", "threshold", "heads inactive in most sequences", "95 % interval", "share of heads"],
        [
            [
                name,
                SCORES[name].inactive,
                number(site.spreads[name].thresholds[INACTIVE_QUANTILE]),
                f"{found.heads:,}",
                _interval(found),
                percent(found.heads / heads),
            ]
            for name, found in inactive_counts(site.spreads)
        ],
        texts=2,
    )


def _interval(found: Persistence) -> str:
    return "–" if found.low is None else f"{found.low:,} to {found.high:,}"


def _lowest(site: SiteNumbers) -> list[str]:
    ranked = site.spreads.get(RANKED_BY)
    if ranked is None:
        return [pages.paragraph(f"{RANKED_BY} was not measured in this scan.", "warning")]
    compared = [name for name in COMPARED if name in site.spreads]
    order = [int(i) for i in np.argsort(ranked.mean, kind="stable")[:_MOST_ROWS] if np.isfinite(ranked.mean[i])]
    return [
        pages.heading(f"Heads with the lowest {RANKED_BY}"),
        pages.paragraph("Their outputs are small compared with other heads of the layer.", "note"),
        pages.table(
            ["layer", "head", "KV head", RANKED_BY, "std", "inactive in", *compared],
            [_row(site, ranked, i, compared) for i in order],
            texts=0,
        ),
    ]


def _row(site: SiteNumbers, ranked: Spread, i: int, compared: Sequence[str]) -> list[str]:
    heads = site.heads
    assert ranked.inactive is not None
    return [
        str(heads.layer[i]),
        str(heads.head[i]),
        str(heads.kv_head[i]),
        _number(ranked.mean[i]),
        _number(ranked.std[i]),
        percent(float(ranked.inactive[i])),
        *(_number(site.spreads[name].mean[i]) for name in compared),
    ]


def _number(value: float) -> str:
    return number(float(value) if np.isfinite(value) else None)
