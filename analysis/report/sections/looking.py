"""Report section on where heads look: positional heads, and weight by distance."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.analysis.report.figures.profile_charts import profiles_figure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import percent
from headscan.analysis.schema.views import POSITIONAL_SHARE
from headscan.analysis.store.store import Store

IDENTITY = "positions"

#: With more positional heads their list is folded.
_MOST_UNFOLDED = 20


def looking_section(store: Store, run_id: str, sites: Sequence[str]) -> str | None:
    """Return positional heads and weight by distance; None without profiles."""
    parts = []
    for site in sites:
        plot = profiles_figure(store, run_id, site=site)
        if plot is not None:
            parts += [pages.heading(f"{site} attention")] if len(sites) > 1 else []
            parts.append(pages.figure(plot.update_layout(margin_t=40), f"profiles-{site}"))
    if not parts:
        return None
    note = pages.paragraph(
        f"Positional heads: the largest weight is at one offset for at least {POSITIONAL_SHARE:.0%} of"
        " queries (arXiv 1905.09418). Weight by distance: mean over the layer's heads and the sequences, in bins that"
        " double. Both count every query, including early ones with few keys.",
        "note",
    )
    return pages.section("Where heads look", [note, *_positional_heads(store, run_id), *parts], IDENTITY)


def _positional_heads(store: Store, run_id: str) -> list[str]:
    """Return a sentence and a list of the positional heads; empty if not measured."""
    measured = store.query("SELECT count(argmax_offsets) AS rows FROM head_statistics WHERE run_id = ?", [run_id])
    if measured["rows"].to_pylist() == [0]:
        return []
    found = store.query(
        "SELECT site, layer, head, key_offset, share FROM all_positional_heads WHERE run_id = ?"
        " ORDER BY key_offset, share DESC, site, layer, head",
        [run_id],
    ).to_pylist()
    if not found:
        return [pages.paragraph("No head is positional.")]
    offsets = [row["key_offset"] for row in found]
    counts = ", ".join(f"{offsets.count(offset)} at offset {offset}" for offset in dict.fromkeys(offsets))
    rows = [
        [row["site"], str(row["layer"]), str(row["head"]), f"{row['key_offset']:+d}", percent(row["share"])]
        for row in found
    ]
    table = pages.table(["site", "layer", "head", "offset of the key", "share of queries"], rows)
    few = len(found) <= _MOST_UNFOLDED
    listed = table if few else pages.folded(f"All {len(found)} positional heads", table)
    return [pages.paragraph(f"Positional heads found: {counts}."), listed]
