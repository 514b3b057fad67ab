"""The sections of a report that show numbers, each as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import pages
from analysis.figures import arms_figure, head_heatmap, plan_heatmap, profiles_figure, share_figure
from analysis.head_plan import HeadPlan
from analysis.store import Store
from analysis.verdicts import ArmVerdict, judge
from analysis.views import INACTIVE_QUANTILE, POSITIONAL_SHARE
from headscan.catalog import SCORES, STATISTICS

#: The score the table of inactive heads is ordered by: on average the best of the paper's.
RANKED_BY = "output_norm_ln"

#: What that table shows beside it.
BESIDE = ("output_norm", "first_token_weight", "entropy", "distant_mass")

_MOST_ROWS = 20


def _sites(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(head["site"] for head in heads))


def heatmaps_section(store: Store, run_id: str, heads: Sequence[Mapping[str, Any]], scores: Sequence[str]) -> str:
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
    """Where the heads of each site look; None where the scan has no profiles."""
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
        f"Positional heads: the largest weight is on one and the same offset for at least {POSITIONAL_SHARE:.0%} of"
        " queries (arXiv 1905.09418). Weight by distance: mean over the layer's heads and the sequences, in bins that"
        " double. Both count every query, also the early ones that have few keys.",
        "note",
    )
    return pages.section("Where heads look", [note, *_positional_heads(store, run_id), *parts])


def _positional_heads(store: Store, run_id: str) -> list[str]:
    """How many heads look at which offset, as a paragraph; none where that was not measured."""
    measured = store.query("SELECT count(argmax_offsets) AS rows FROM head_statistics WHERE run_id = ?", [run_id])
    if measured["rows"].to_pylist() == [0]:
        return []
    found = store.query(
        "SELECT key_offset, count(*) AS heads FROM positional_heads WHERE run_id = ? GROUP BY 1 ORDER BY 1", [run_id]
    ).to_pylist()
    offsets = ", ".join(f"{row['heads']} at offset {row['key_offset']}" for row in found)
    return [pages.paragraph(f"Positional heads found: {offsets}." if found else "No head is positional.")]


def inactive_heads_section(heads: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        pages.paragraph(
            f"The heads of the lowest {RANKED_BY}: they write least, compared with the other heads of their layer."
            f" “Inactive in”: share of sequences in which the head lies beyond the {INACTIVE_QUANTILE:.0%} quantile of"
            " all heads. Whether a model can do without them is for an evaluation to say.",
            "note",
        )
    ]
    sites = _sites(heads)
    beside = [name for name in BESIDE if any(head[name] is not None for head in heads)]
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
                ["layer", "head", "KV head", RANKED_BY, "std", "inactive in", *beside],
                [
                    [
                        str(head["layer"]),
                        str(head["head"]),
                        str(head["kv_head"]),
                        _number(head[RANKED_BY]),
                        _number(head[f"{RANKED_BY}_std"]),
                        _percent(head[f"{RANKED_BY}_inactive"]),
                        *(_number(head[name]) for name in beside),
                    ]
                    for head in lowest
                ],
                texts=0,
            )
        )
    return pages.section("Most inactive heads", parts)


def arms_section(store: Store, evaluation: Mapping[str, Any]) -> str:
    verdict = judge(store, evaluation["run_id"])
    tasks = evaluation["corpus"]
    parts = [
        pages.paragraph(
            f"Heads silenced{f' on {tasks}' if tasks else ''}: difference to the baseline on the same questions with"
            " its 95 % interval (bootstrap within tasks), and McNemar's exact test. The dashed line is one point below"
            " the baseline; an arm is removable within one point when its whole interval lies above.",
            "note",
        ),
        pages.figure(arms_figure(verdict), "arms"),
    ]
    shares = {round(arm.zeroed_share, 3) for arm in verdict.arms if arm.kind != "random" and arm.zeroed_share}
    if len(shares) > 2:
        parts.append(pages.figure(share_figure(verdict), "arms-by-share"))
    sentences = verdict.sentences()
    if sentences:
        parts += [pages.heading("Verdicts"), pages.bullets(sentences)]
    parts.append(
        pages.table(
            ["arm", "kind", "silenced", "questions", "accuracy", "difference", "95 % interval", "p"],
            [_arm_row(arm) for arm in verdict.arms],
            texts=2,
        )
    )
    baseline = verdict.arms[0].paired.baseline
    parts.append(pages.paragraph(f"Accuracy in %, baseline {baseline:.2f}; differences in points.", "note"))
    return pages.section("What silencing heads costs", parts)


def _arm_row(arm: ArmVerdict) -> list[str]:
    p = arm.paired
    return [
        arm.name,
        arm.kind,
        _percent(arm.zeroed_share),
        f"{p.questions:,}",
        f"{p.arm:.2f}",
        f"{p.difference:+.2f}",
        f"{p.low:+.2f} to {p.high:+.2f}",
        f"{p.p_value:.3g}",
    ]


def plan_section(plan: HeadPlan) -> str:
    budget = plan.budget
    window = next((head for head in plan.heads if head.action == "window"), None)
    width = "" if window is None else f" of the first {window.sink} and last {window.recent} tokens"
    parts = [
        pages.paragraph(
            f"{budget.window_heads} of {budget.kv_heads} KV heads ({budget.window_share:.1%}) keep a window{width}; the"
            " others keep everything. Bytes are those of one sequence."
        ),
        pages.table(
            ["tokens", "KV cache", "with the plan", "saved", "share saved"],
            [
                [
                    f"{row.tokens:,}",
                    _bytes(row.kv_bytes),
                    _bytes(row.planned_bytes),
                    _bytes(row.saved_bytes),
                    _percent(row.saved_share),
                ]
                for row in budget.lengths
            ],
            texts=0,
        ),
        pages.figure(plan_heatmap(plan).update_layout(title=None, margin_t=40), "plan"),
    ]
    counts = Counter((head.layer, head.head_class) for head in plan.heads)
    layers = pages.table(
        ["layer", "attention", "KV heads", "retrieval", "streaming", "protected"],
        [
            [
                str(layer.layer),
                layer.type if layer.sliding_window is None else f"sliding, {layer.sliding_window:,}",
                str(layer.num_key_value_heads),
                *(str(counts[layer.layer, name]) for name in ("retrieval", "streaming", "protected")),
            ]
            for layer in plan.model.layers
        ],
        texts=2,
    )
    parts.append(layers if len(plan.model.layers) <= 12 else pages.folded("Counts per layer", layers))
    parts.append(pages.paragraph(f"Keep-score: {plan.score}.", "note"))
    if plan.notes:
        parts.append(pages.bullets(plan.notes))
    if plan.validation is None:
        parts.append(
            pages.paragraph(
                "This plan has not been validated: it says where heads look, not what a task loses without that.",
                "warning",
            )
        )
    else:
        parts += [
            pages.heading("Validation"),
            pages.facts((name, pages.one_line(v)) for name, v in plan.validation.items()),
        ]
    return pages.section("Head plan", parts)


def definitions_section(scores: Sequence[str]) -> str:
    rows = []
    for name in dict.fromkeys((*scores, RANKED_BY)):
        score = SCORES.get(name)
        needed = STATISTICS[name if score is None else score.statistic]
        formula = needed.formula if score is None or score.normaliser is None else f"{score.formula}; {needed.formula}"
        unit = needed.unit if score is None or score.normaliser is None else "ratio"
        rows.append([name, formula, unit, score.inactive if score else "–", needed.source])
    return pages.section(
        "Definitions",
        [
            pages.paragraph(
                "For one sequence and one query head: A is the causal softmax, V the value vectors its KV head gives"
                " it, O = A V its output before the output projection. A layer mean is over all query heads of the"
                " layer, and ratios are taken in each sequence before any averaging.",
                "note",
            ),
            pages.table(["name", "formula", "unit", "inactive when", "source"], rows, texts=5),
        ],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


def _describe(name: str) -> str:
    """The catalogue's formula of a score or statistic, and which end is inactive."""
    score = SCORES.get(name)
    if score is None:
        return STATISTICS[name].formula
    text = STATISTICS[score.statistic].formula if score.normaliser is None else score.formula
    return f"{text}; {score.inactive} = inactive"
