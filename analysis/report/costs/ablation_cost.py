"""Report section on the cost of ablating heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headscan.analysis.report.costs.sweep_curves import sweep_parts
from headscan.analysis.report.figures.arm_chart import FRAME, arms_figure, recall_figure, share_figure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import percent
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_RETAINED
from headscan.analysis.verdicts.confirmation import Choice, judge_sweep
from headscan.analysis.verdicts.curves import is_sweep, read_curves
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict

IDENTITY = "ablation"

#: With more arms the list of arms is folded; the curves summarise it.
_MOST_UNFOLDED = 20

#: Definition of the difference in every figure and table of the section.
_DIFFERENCE = (
    "difference to the baseline on the same questions with its 95 % interval (bootstrap within tasks; if few answers"
    " differ, the wider one of bootstrap and score test), and McNemar's exact test. The dashed line is one point below"
    " the baseline. An arm is removable within one point if its whole interval lies above that line, no single task"
    " loses more than one point (with intervals widened for the number of tasks)"
)

#: Above the verdicts on all arms of a sweep.
_NOT_CORRECTED = (
    "These verdicts use all questions and treat each arm as if it had been chosen in advance. They are too optimistic"
    " for the best of many arms, whose verdict is above."
)


def arms_section(
    store: Store, evaluation: Mapping[str, Any], verdict: Verdict, choices: Sequence[Choice] | None = None
) -> str:
    """Return the section of an evaluate run.

    Args:
        choices: The selected arms of a sweep with their verdicts; None selects and judges them on different questions.

    Raises:
        VerdictError: The run's arms cannot be compared.
    """
    tasks = evaluation["corpus"]
    what = _DIFFERENCE if verdict.arms else "no task has right answers, so there is no accuracy to compare"
    recall = (
        f" and it keeps at least {LEAST_RETAINED:.0f} % of the model's recall above chance"
        if any(arm.recall for arm in verdict.arms)
        else ""
    )
    parts = [pages.paragraph(f"Heads ablated{f' on {tasks}' if tasks else ''}: {what}{recall}.", "note")]
    if verdict.progress:
        parts.append(pages.paragraph(f"{verdict.progress}: the curves and verdicts cover only these.", "warning"))
    curves = read_curves(store, evaluation["run_id"], verdict.unrecorded)
    swept = is_sweep(curves)
    if swept:
        parts += sweep_parts(curves, judge_sweep(store, verdict) if choices is None else choices)
    parts += _recall_parts(verdict)
    # The arms of a sweep are points of its curves; a row for each arm would fill pages.
    arms = [
        *([] if swept else _drawn(verdict)),
        *([pages.paragraph(_NOT_CORRECTED, "note")] if swept else []),
        *_verdict_parts(verdict),
    ]
    if len(verdict.arms) > _MOST_UNFOLDED:
        parts.append(pages.folded(f"All {len(verdict.arms)} arms, one by one", "\n".join(arms)))
    else:
        parts += arms
    return pages.section("What ablating heads costs", parts, IDENTITY)


def _recall_parts(verdict: Verdict) -> list[str]:
    plot = recall_figure(verdict)
    if plot is None:
        return []
    note = (
        "Each point is an arm: its difference in the recall tasks over its difference in the benchmark, in points. A"
        " benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574): arms at the lower"
        " right pass the benchmark and lose recall."
    )
    if min(arm.paired.difference for arm in verdict.arms) < -FRAME:
        note += (
            f" Arms that lose more than {FRAME:g} benchmark points are triangles at the left edge, and arms that fall"
            " below the frame are at its lower edge; the texts and the CSV have their true numbers."
        )
    return [pages.heading("Recall and benchmark"), pages.paragraph(note, "note"), pages.figure(plot, "recall")]


def _drawn(verdict: Verdict) -> list[str]:
    if not verdict.arms:
        return []
    parts = [pages.figure(arms_figure(verdict), "arms")]
    shares = {round(arm.zeroed_share, 3) for arm in verdict.arms if not arm.is_random and arm.zeroed_share}
    if len(shares) > 2:
        parts.append(pages.figure(share_figure(verdict), "arms-by-share"))
    return parts


def _verdict_parts(verdict: Verdict) -> list[str]:
    sentences = verdict.sentences()
    verdicts = [pages.heading("Verdicts"), pages.bullets(sentences)] if sentences else []
    return verdicts + (_table(verdict) if verdict.arms else [])


def _table(verdict: Verdict) -> list[str]:
    families = list(dict.fromkeys(recall.family for arm in verdict.arms for recall in arm.recall))
    several = any(len(arm.tasks) > 1 for arm in verdict.arms)
    headings = [*(["worst task"] if several else []), *(f"{family} left" for family in families)]
    baseline = verdict.arms[0].paired.baseline
    progress = f"; {verdict.progress}" if verdict.progress else ""
    return [
        pages.table(
            ["arm", "kind", "ablated", "questions", "accuracy", "difference", "95 % interval", "p", *headings],
            [_arm_row(arm, families, several) for arm in verdict.arms],
            texts=2,
        ),
        pages.paragraph(
            f"Accuracy in %, baseline {baseline:.2f}; differences in points{progress}. Worst task: the task with the"
            " clearest loss. Recall left: share of the baseline's accuracy above chance, with its 95 % interval.",
            "note",
        ),
    ]


def _arm_row(arm: ArmVerdict, families: list[str], several_tasks: bool) -> list[str]:
    p = arm.paired
    recall = {family.family: family.share_left() for family in arm.recall if family.informative}
    worst = [arm.tasks[0].points() if arm.tasks else "–"] if several_tasks else []
    return [
        arm.name,
        arm.kind.label,
        percent(arm.zeroed_share),
        f"{p.questions:,}",
        f"{p.arm:.2f}",
        f"{p.difference:+.2f}",
        f"{p.low:+.2f} to {p.high:+.2f}",
        f"{p.p_value:.3g}",
        *worst,
        *(recall.get(family, "–") for family in families),
    ]
