"""The cost of ablating heads: the curves of a sweep first, then arm by arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscan.analysis.report.figures.arm_chart import arms_figure, share_figure
from headscan.analysis.report.figures.recall_chart import FRAME, recall_figure
from headscan.analysis.report.sections import page as pages
from headscan.analysis.report.sections.number_format import percent
from headscan.analysis.report.sections.sweep_curves import sweep_parts
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_RETAINED
from headscan.analysis.verdicts.confirmation import judge_sweep
from headscan.analysis.verdicts.curves import is_sweep, read_curves
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict, judge

#: More arms than this are folded away: their curves say it shorter.
_MOST_UNFOLDED = 20

#: A difference to the baseline as every figure and table of the section means it.
_DIFFERENCE = (
    "difference to the baseline on the same questions with its 95 % interval (bootstrap within tasks;"
    " where few answers differ the score test's, if wider), and McNemar's"
    " exact test. The dashed line is one point below the baseline; an arm is removable within one point when its whole"
    " interval lies above, no single task is shown to lose more than one point (with intervals widened for the number"
    " of tasks)"
)

#: Above the verdicts on all arms of a sweep.
_NOT_CORRECTED = (
    "These verdicts use all questions and treat each arm as if it had been named in advance. They are too optimistic"
    " for the best of many arms: the verdict on that one is above."
)


def arms_section(store: Store, evaluation: Mapping[str, Any], *, confirm: bool = True) -> str:
    """The section of an evaluate run.

    Args:
        confirm: Judge the best arms of a sweep on the questions that did not select them.

    Raises:
        VerdictError: The run's arms cannot be compared.
    """
    verdict = judge(store, evaluation["run_id"])
    tasks = evaluation["corpus"]
    what = _DIFFERENCE if verdict.arms else "no task has right answers, so there is no accuracy to compare"
    recall = (
        f" and it is shown to keep at least {LEAST_RETAINED:.0f} % of the model's recall above chance"
        if any(arm.recall for arm in verdict.arms)
        else ""
    )
    parts = [pages.paragraph(f"Heads ablated{f' on {tasks}' if tasks else ''}: {what}{recall}.", "note")]
    if verdict.progress:
        parts.append(pages.paragraph(f"{verdict.progress}: the curves and verdicts are of those.", "warning"))
    curves = read_curves(store, evaluation["run_id"], verdict.unrecorded)
    swept = is_sweep(curves)
    if swept:
        parts += sweep_parts(curves, judge_sweep(store, verdict, confirm=confirm))
    parts += _recall_parts(verdict)
    # A sweep's arms are points of its curves: drawn once more, one below the other, they would fill pages.
    arms = [
        *([] if swept else _drawn(verdict)),
        *([pages.paragraph(_NOT_CORRECTED, "note")] if swept else []),
        *_told(verdict),
    ]
    if len(verdict.arms) > _MOST_UNFOLDED:
        parts.append(pages.folded(f"All {len(verdict.arms)} arms, one by one", "\n".join(arms)))
    else:
        parts += arms
    return pages.section("What ablating heads costs", parts)


def _recall_parts(verdict: Verdict) -> list[str]:
    plot = recall_figure(verdict)
    if plot is None:
        return []
    note = (
        "Each point is an arm: what it loses in the recall tasks against what it loses in the benchmark, in points. A"
        " benchmark of short questions does not see the loss of heads that retrieve (arXiv 2404.15574): arms at the"
        " lower right pass the benchmark and lose recall."
    )
    if min(arm.paired.difference for arm in verdict.arms) < -FRAME:
        note += f" Arms that lose more than {FRAME:g} points in it are outside the frame: a double click shows all."
    return [pages.heading("Recall beside the benchmark"), pages.paragraph(note, "note"), pages.figure(plot, "recall")]


def _drawn(verdict: Verdict) -> list[str]:
    if not verdict.arms:
        return []
    parts = [pages.figure(arms_figure(verdict), "arms")]
    shares = {round(arm.zeroed_share, 3) for arm in verdict.arms if not arm.is_random and arm.zeroed_share}
    if len(shares) > 2:
        parts.append(pages.figure(share_figure(verdict), "arms-by-share"))
    return parts


def _told(verdict: Verdict) -> list[str]:
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
            f"Accuracy in %, baseline {baseline:.2f}; differences in points{progress}. Worst task: the one with the"
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
