"""Report sections on heads: maps, distances, most inactive heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headscan.analysis.report.figures.head_map import head_heatmap
from headscan.analysis.report.figures.profile_charts import profiles_figure
from headscan.analysis.report.sections import page as pages
from headscan.analysis.report.sections.number_format import number, percent
from headscan.analysis.schema.views import INACTIVE_QUANTILE, POSITIONAL_SHARE
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES, STATISTICS

#: Score that orders the table of inactive heads: on average the best one of the paper.
RANKED_BY = "output_norm_ln"

#: Further columns of that table.
COMPARED = ("output_norm", "first_token_weight", "entropy", "distant_mass")

_MOST_ROWS = 20


def _sites(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(head["site"] for head in heads))


def heatmaps_section(store: Store, run_id: str, heads: Sequence[Mapping[str, Any]], scores: Sequence[str]) -> str:
    """Return a map of each score or statistic, by site."""
    parts = [
        pages.paragraph(
            "Means over the sequences: layers downward, query heads across. Point at a head to read its numbers.",
            "note",
        )
    ]
    sites = _sites(heads)
    for site in sites:
        for name in scores:
            parts.append(pages.heading(name if len(sites) == 1 else f"{name}, {site} attention"))
            parts.append(pages.paragraph(_describe(name), "note"))
            if all(head[name] is None for head in heads if head["site"] == site):
                parts.append(pages.paragraph("Not measured in this scan.", "warning"))
                continue
            plot = head_heatmap(store, run_id, name, site=site)
            parts.append(pages.figure(plot.update_layout(title=None, margin_t=40), f"heatmap-{len(parts)}"))
    return pages.section("Heads", parts)


def profiles_section(store: Store, run_id: str, heads: Sequence[Mapping[str, Any]]) -> str | None:
    """Return positional heads and weight by distance; None without profiles."""
    sites = _sites(heads)
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
    return pages.section("Where heads look", [note, *_positional_heads(store, run_id), *parts])


def _positional_heads(store: Store, run_id: str) -> list[str]:
    """Return a paragraph on positional heads; empty if not measured."""
    measured = store.query("SELECT count(argmax_offsets) AS rows FROM head_statistics WHERE run_id = ?", [run_id])
    if measured["rows"].to_pylist() == [0]:
        return []
    found = store.query(
        "SELECT key_offset, count(*) AS heads FROM all_positional_heads WHERE run_id = ? GROUP BY 1 ORDER BY 1",
        [run_id],
    ).to_pylist()
    offsets = ", ".join(f"{row['heads']} at offset {row['key_offset']}" for row in found)
    return [pages.paragraph(f"Positional heads found: {offsets}." if found else "No head is positional.")]


def inactive_heads_section(heads: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the heads with the lowest output norm."""
    parts = [
        pages.paragraph(
            f"Heads with the lowest {RANKED_BY}: their outputs are small compared with other heads of the layer."
            f" “Inactive in”: share of sequences in which the head lies beyond the {INACTIVE_QUANTILE:.0%} quantile of"
            " all heads. An evaluation shows whether the model needs them.",
            "note",
        )
    ]
    sites = _sites(heads)
    compared = [name for name in COMPARED if any(head[name] is not None for head in heads)]
    for site in sites:
        if len(sites) > 1:
            parts.append(pages.heading(f"{site} attention"))
        measured = [head for head in heads if head["site"] == site and head[RANKED_BY] is not None]
        if not measured:
            parts.append(pages.paragraph(f"{RANKED_BY} was not measured in this scan.", "warning"))
            continue
        lowest = sorted(measured, key=lambda head: head[RANKED_BY])[:_MOST_ROWS]
        parts.append(
            pages.table(
                ["layer", "head", "KV head", RANKED_BY, "std", "inactive in", *compared],
                [
                    [
                        str(head["layer"]),
                        str(head["head"]),
                        str(head["kv_head"]),
                        number(head[RANKED_BY]),
                        number(head[f"{RANKED_BY}_std"]),
                        percent(head[f"{RANKED_BY}_inactive"]),
                        *(number(head[name]) for name in compared),
                    ]
                    for head in lowest
                ],
                texts=0,
            )
        )
    return pages.section("Most inactive heads", parts)


def _describe(name: str) -> str:
    """Return the formula of a score or statistic, and its inactive direction."""
    score = SCORES.get(name)
    if score is None:
        return STATISTICS[name].formula
    text = STATISTICS[score.statistic].formula if score.normaliser is None else score.formula
    return f"{text}; {score.inactive} = inactive"
