"""Report section on a head plan and its savings."""

from __future__ import annotations

from collections import Counter

from headscan.analysis.plans import HeadClass, HeadPlan, PlanMethod
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import byte_count, percent

IDENTITY = "head-plan"

#: What the scores of a method show.
_EVIDENCE: dict[PlanMethod, str] = {
    "measured": "it shows the loss that a window on each head adds",
    "distant_mass": "it shows where heads attend",
    "retrieval_score": "it shows which heads copy from far back",
    "imported": "it shows the numbers of another tool",
    "random": "it shows random numbers",
}

_CLASSES: tuple[HeadClass, ...] = ("retrieval", "streaming", "removable", "protected")


def plan_section(plan: HeadPlan) -> str:
    """Return the section on a plan: windows, saved bytes and validation."""
    budget = plan.budget
    dropped = f", {budget.dropped_heads} keep none" if budget.dropped_heads else ""
    parts = [
        pages.paragraph(
            f"Method {plan.method}: {budget.window_heads} of {budget.kv_heads} KV heads ({budget.window_share:.1%})"
            f" keep {plan.window_text()}{dropped}; the others keep all tokens. Bytes are for one sequence."
        ),
        pages.table(
            ["tokens", "KV cache", "with the plan", "saved", "share saved"],
            [
                [
                    f"{row.tokens:,}",
                    byte_count(row.kv_bytes),
                    byte_count(row.planned_bytes),
                    byte_count(row.saved_bytes),
                    percent(row.saved_share),
                ]
                for row in budget.lengths
            ],
            texts=0,
        ),
        pages.paragraph("The map of heads shows the plan, the keep-scores, and the damage of a window.", "note"),
    ]
    counts = Counter((head.layer, head.head_class) for head in plan.heads)
    layers = pages.table(
        ["layer", "KV cache", "KV heads", *_CLASSES],
        [
            [
                str(layer.layer),
                layer.type if layer.cache_tokens is None else f"{layer.type}, {layer.cache_tokens:,} tokens",
                str(layer.num_key_value_heads),
                *(str(counts[layer.layer, name]) for name in _CLASSES),
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
                f"This plan has not been validated: {_EVIDENCE[plan.method]}, not the accuracy that a task loses."
                " Evaluate it with `headscan evaluate --plan`.",
                "warning",
            )
        )
    else:
        parts += [
            pages.heading("Loss on held-out prompts"),
            pages.facts((name, pages.one_line(v)) for name, v in plan.validation.items()),
            pages.paragraph(
                "A loss is no verdict on a task: evaluate the plan with `headscan evaluate --plan`.", "note"
            ),
        ]
    return pages.section("Head plan", parts, IDENTITY)
