"""Report sections on heads, a plan and a second scan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from headscan.catalog import SCORES, STATISTICS
from headscan.plans import METHOD_SHOWS, HeadClass, HeadPlan, planned_bytes
from headscan.report import page_parts as pages
from headscan.report.head_data import HeadData, SiteNumbers
from headscan.report.head_measures import HeadMeasure
from headscan.report.page_parts import byte_count, number
from headscan.report.profile_charts import overlap_figure, profiles_figure
from headscan.store.head_spread import inactive_counts
from headscan.store.scan_tables import INACTIVE_QUANTILE, MOSTLY
from headscan.store.store import Store
from headscan.store.views import POSITIONAL_SHARE, ROLES
from headscan.text_tables import percent
from headscan.verdicts.arm_verdict import Outcome
from headscan.verdicts.judge import Verdict


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


COMPARISON = "comparison"


def comparison_section(scan: Mapping[str, Any], data: HeadData) -> str | None:
    """Return how far the means of each measure moved; None without another scan."""
    if data.compared is None:
        return None
    other = data.compared
    rows = [
        _comparison_row(site, measure, len(data.sites) > 1)
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
        "Compared with another scan", [pages.paragraph(note, "note"), pages.table(columns, rows)], COMPARISON
    )


def _comparison_row(site: SiteNumbers, measure: HeadMeasure, several: bool) -> list[str]:
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


BEHAVING = "behaviours"

_MOST_HEADS = 5


def behaving_heads_section(sites: Sequence[SiteNumbers], runs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the heads of each role, and the strongest heads by behaviour, importance and other tables, whose ``runs``
    are given by group of measures; None without any.
    """
    parts = [part for site in sites if site.roles.found for part in _roles(site, len(sites) > 1)]
    if runs:
        parts.append(pages.paragraph("The map above shows each of the following measures for every head.", "note"))
    for group, run in runs.items():
        parts.append(pages.heading(group))
        parts.append(pages.paragraph(f"Run {run['run_id']} of {run['model']}.", "note"))
        rows = [
            [measure.name + ("" if len(sites) == 1 else f", {site.heads.site}"), *_strongest(site, measure)]
            for site in sites
            for measure in site.numbers.measures
            if measure.group == group
        ]
        parts.append(pages.table(["measure", "highest: layer.head and value", "heads above the limit"], rows, texts=3))
    return pages.section("What heads do", parts, BEHAVING) if parts else None


def _roles(site: SiteNumbers, several: bool) -> list[str]:
    """Return the table of roles that `headscan roles` prints."""
    return [
        pages.heading(f"Roles, {site.heads.site} attention" if several else "Roles"),
        pages.columns(
            site.roles.found,
            {
                "role": lambda of: of.role,
                "number of a head": lambda of: ROLES[of.role].formula,
                "threshold": lambda of: ROLES[of.role].rule,
                "threshold of": lambda of: ROLES[of.role].threshold_source,
                "strongest, LAYER:HEAD": lambda of: of.strongest() or "–",
                "heads": lambda of: f"{len(of.heads)} of {of.measured}",
            },
            texts=5,
        ),
        pages.paragraph("A head may have several roles, or none.", "note"),
    ]


def _strongest(site: SiteNumbers, measure: HeadMeasure) -> list[str]:
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


#: Score of the first map, and of the table of inactive heads: on average the best one of the paper.
RANKED_BY = "output_norm_ln"

#: Further columns of that table.
COMPARED = ("output_norm", "first_token_weight", "entropy", "distant_mass", "confidence", "received_max")

_MOST_ROWS = 20

INACTIVE = "inactive"


def inactive_heads_section(data: HeadData) -> str:
    """Return counts of inactive heads by score, and a table of the heads with the lowest output norm."""
    sites = data.sites
    parts = [
        pages.paragraph(
            f"A head is inactive in a sequence if its score lies beyond the {percent(INACTIVE_QUANTILE)} quantile of"
            f" all (sequence, head) of the scan, so {percent(INACTIVE_QUANTILE)} of these are inactive by definition."
            " The table shows on how many heads they concentrate: heads that are inactive in at least"
            f" {percent(MOSTLY)} of the sequences. Intervals: 95 %, bootstrap of whole sequences with the threshold"
            " fixed. An evaluation shows whether the model needs them.",
            "note",
        )
    ]
    for site in sites:
        if len(sites) > 1:
            parts.append(pages.heading(f"{site.heads.site} attention"))
        parts += [_counts(site), *_lowest(site, data.covered)]
    return pages.section("Inactive heads", parts, INACTIVE)


def _counts(site: SiteNumbers) -> str:
    heads = len(site.heads)
    return pages.columns(
        inactive_counts(site.spreads),
        {
            "score": lambda of: of[0],
            "inactive end": lambda of: SCORES[of[0]].inactive,
            "threshold": lambda of: number(site.spreads[of[0]].thresholds[INACTIVE_QUANTILE]),
            "heads inactive in most sequences": lambda of: f"{of[1].heads:,}",
            "95 % interval": lambda of: "–" if of[1].low is None else f"{of[1].low:,} to {of[1].high:,}",
            "share of heads": lambda of: percent(of[1].heads / heads),
        },
        texts=2,
    )


def _lowest(site: SiteNumbers, covered: str) -> list[str]:
    ranked = site.spreads.get(RANKED_BY)
    if ranked is None:
        return [pages.paragraph(f"{RANKED_BY} was not measured in this scan.", "warning")]
    compared = [name for name in COMPARED if name in site.spreads and not (covered and name == "distant_mass")]
    order = [int(i) for i in np.argsort(ranked.mean, kind="stable")[:_MOST_ROWS] if np.isfinite(ranked.mean[i])]
    heads, inactive = site.heads, ranked.inactive
    assert inactive is not None
    return [
        pages.heading(f"Heads with the lowest {RANKED_BY}"),
        pages.paragraph(
            "Their outputs are small compared with other heads of the layer."
            + f" Not shown: {covered}." * bool(covered),
            "note",
        ),
        pages.table(
            ["layer", "head", "KV head", RANKED_BY, "std", "inactive in", *compared],
            [
                [
                    *(str(number) for number in (heads.layer[i], heads.head[i], heads.kv_head[i])),
                    _number(ranked.mean[i]),
                    _number(ranked.std[i]),
                    percent(float(inactive[i])),
                    *(_number(site.spreads[name].mean[i]) for name in compared),
                ]
                for i in order
            ],
            texts=0,
        ),
    ]


def _number(value: float) -> str:
    return number(float(value) if np.isfinite(value) else None)


def agreement_parts(site: SiteNumbers) -> list[str]:
    """Return the overlap of the heads that rules ablate; empty with fewer than two scores."""
    pairs = site.overlaps()
    if not pairs:
        return []
    chance = INACTIVE_QUANTILE / (2 - INACTIVE_QUANTILE)
    note = pages.paragraph(
        f"Each score picks the {percent(INACTIVE_QUANTILE)} of (sequence, layer, head) that is most inactive. The map"
        " shows the intersection over union of each pair of scores, in percent; two independent scores would share"
        f" {percent(chance)}. Scores that were not measured, or are equal for all heads, are left out.",
        "note",
    )
    return [pages.heading("Do the scores agree?"), note, pages.figure(overlap_figure(pairs), "overlap")]


POSITIONS = "positions"

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
        f"Positional heads: the largest weight is at one offset for at least {percent(POSITIONAL_SHARE)} of"
        " queries (arXiv 1905.09418). Weight by distance: mean over the layer's heads and the sequences, in bins that"
        " double. Both count every query, including early ones with few keys.",
        "note",
    )
    return pages.section("Where heads look", [note, *_positional_heads(store, run_id), *parts], POSITIONS)


def _positional_heads(store: Store, run_id: str) -> list[str]:
    """Return a sentence and a list of the positional heads; empty if not measured."""
    measured = "SELECT 1 FROM all_head_profiles WHERE run_id = ? AND profile = 'argmax_offsets' LIMIT 1"
    if store.query(measured, [run_id]).num_rows == 0:
        return []
    positional = store.query(
        "SELECT site, layer, head, key_offset, share FROM all_positional_heads WHERE run_id = ?"
        " ORDER BY key_offset, share DESC, site, layer, head",
        [run_id],
    ).to_pylist()
    if not positional:
        return [pages.paragraph("No head is positional.")]
    offsets = [row["key_offset"] for row in positional]
    counts = ", ".join(f"{offsets.count(offset)} at offset {offset}" for offset in dict.fromkeys(offsets))
    rows = [
        [row["site"], str(row["layer"]), str(row["head"]), f"{row['key_offset']:+d}", percent(row["share"])]
        for row in positional
    ]
    table = pages.table(["site", "layer", "head", "offset of the key", "share of queries"], rows)
    few = len(positional) <= _MOST_UNFOLDED
    listed = table if few else pages.folded(f"All {len(positional)} positional heads", table)
    return [pages.paragraph(f"Positional heads found: {counts}."), listed]


HEAD_PLAN = "head-plan"

_NOTHING: Mapping[str, str] = {}


def plan_section(
    plan: HeadPlan, verdict: Verdict | None = None, tokens: int | None = None, lost: Mapping[str, str] = _NOTHING
) -> str:
    """Return the section on a plan: what the evaluation shows of it, windows, saved bytes and validation. Bytes are
    those at ``tokens`` tokens, too; ``lost`` are arms that lose too much text loss to be asked a question, with the
    loss in words.
    """
    budget = plan.budget
    dropped = f", {budget.dropped_heads} keep none" if budget.dropped_heads else ""
    title, evaluated = _tried_plan(plan, verdict, lost)
    lengths = {at.tokens: (at.kv_bytes, at.planned_bytes) for at in budget.lengths}
    if tokens is not None:
        lengths[tokens] = (plan.model.cache_bytes(tokens, plan.block), planned_bytes(plan, tokens))
    parts = [
        *evaluated,
        pages.paragraph(
            f"Method {plan.method}: {budget.window_heads} of {budget.kv_heads} KV heads"
            f" ({percent(budget.window_share)}) keep {plan.window_text()}{dropped}; the others keep all tokens. Bytes"
            " are for one sequence."
        ),
        pages.columns(
            sorted(lengths.items()),
            {
                "tokens": lambda at: f"{at[0]:,}",
                "KV cache": lambda at: byte_count(at[1][0]),
                "with the plan": lambda at: byte_count(at[1][1]),
                "saved": lambda at: byte_count(at[1][0] - at[1][1]),
                "share saved": lambda at: percent(1 - at[1][1] / at[1][0]),
            },
            texts=0,
        ),
        pages.paragraph("The map of heads shows the plan, the keep-scores, and the damage of a window.", "note"),
    ]
    counts = Counter((head.layer, head.head_class) for head in plan.heads)
    windowed: dict[int, list[str]] = defaultdict(list)
    for layer_index, kv_head in plan.window_heads:
        windowed[layer_index].append(str(kv_head))
    classes = get_args(HeadClass)
    rows = [
        [
            str(layer.layer),
            layer.type if layer.cache_tokens is None else f"{layer.type}, {layer.cache_tokens:,} tokens",
            str(layer.num_key_value_heads),
            *(str(counts[layer.layer, name]) for name in classes),
            " ".join(windowed[layer.layer]) or "–",
        ]
        for layer in plan.model.layers
    ]
    layers = pages.table(["layer", "KV cache", "KV heads", *classes, "KV heads with a window"], rows, texts=2)
    parts.append(layers if len(plan.model.layers) <= 12 else pages.folded("Counts per layer", layers))
    parts.append(pages.paragraph(f"Keep-score: {plan.score}.", "note"))
    if plan.notes:
        parts.append(pages.bullets(f"{note[:1].upper()}{note[1:]}." for note in plan.notes))
    if plan.validation is None and not evaluated:
        parts.append(
            pages.paragraph(
                f"This plan has not been validated: it shows {METHOD_SHOWS[plan.method]}, not the accuracy that a task"
                " loses. Evaluate it with `headscan evaluate --plan`.",
                "warning",
            )
        )
    if plan.validation is not None:
        # The notes of a measured plan have its losses.
        said = ("loss_increase", "recall_unknown") if plan.method == "measured" else ()
        shown = {name: value for name, value in plan.validation.items() if name not in said}
        parts += [pages.heading("Validation"), pages.facts(pages.shown_settings(shown))]
    if plan.validation is not None and not evaluated:
        loss = "A loss is no verdict on a task: evaluate the plan with `headscan evaluate --plan`."
        parts.append(pages.paragraph(loss, "note"))
    return pages.section(title, parts, HEAD_PLAN)


def _tried_plan(plan: HeadPlan, verdict: Verdict | None, lost: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the title of the section, and what the evaluation shows of the plan in each mode; empty if it is not in
    the evaluation.
    """
    arms = () if verdict is None else verdict.finished
    own = [arm for arm in arms if arm.arm.config.get("plan") == plan.digest and not arm.kind.is_random]
    found = [f"{arm.arm.selection}: {arm.label}{f' ({arm.why})' if arm.why else ''}" for arm in own]
    if not own:
        named = [words for name, words in lost.items() if f" {plan.digest}, " in name]
        found = [f"{Outcome.LOSES} {words} on held-out text, so it was asked no question" for words in named]
    if not found:
        return "Head plan", []
    safe = any(arm.is_safe for arm in own)
    title = "Head plan" if safe else "Head plan, tried and not safe"
    return title, [pages.paragraph(f"Evaluated, {'; '.join(found)}.", None if safe else "warning")]
