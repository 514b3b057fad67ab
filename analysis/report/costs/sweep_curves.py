"""Report section on a sweep: curves and removable shares."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.curve_chart import curves_figure, removable_figure, removable_text, strict_text
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.report.page.number_format import percent
from headscan.analysis.verdict_limits import LEAST_BASELINE, LEAST_QUESTIONS, MARGIN
from headscan.analysis.verdicts.confirmation import Choice
from headscan.analysis.verdicts.curves import Curve

_TITLES = {
    ArmKind.RULE: "Rules: heads chosen again for each input",
    ArmKind.MASK: "Masks: heads chosen once, the same for every input",
}


def sweep_parts(curves: Sequence[Curve], choices: Sequence[Choice] = ()) -> list[str]:
    """Return the curves of a sweep's rules and masks, with tables.

    Args:
        curves: All curves of the sweep.
        choices: The selected arms with their verdicts.
    """
    parts = _selected(choices) if choices else []
    parts.append(pages.paragraph(_explanation(curves), "note"))
    for kind, title in _TITLES.items():
        members = _strictest_first([curve for curve in curves if curve.kind in (kind, kind.control)])
        if any(not curve.is_random for curve in members):
            parts += [pages.heading(title), pages.paragraph(_best(members))]
            parts.append(pages.figure(curves_figure(members), f"curves-{kind}"))
            parts += [pages.figure(removable_figure(members), f"removable-{kind}"), _table(members)]
    return parts


def _selected(choices: Sequence[Choice]) -> list[str]:
    if choices[0].confirmed:
        note = (
            "Half of the questions of each task and one of four recall texts select the best rule and the best mask."
            " The others judge them, so each interval is as valid as that of an arm chosen in advance: an arm that"
            f" truly loses more than {MARGIN:g} point is called removable in at most about 2.5 % of sweeps. All arms"
            " that these questions have judged share this error, so each further one widens the intervals of all."
            " Questions about one document, or about one recall text, are in the same part."
        )
    else:
        note = (
            "All questions both select and judge the best rule and the best mask. The best of many arms looks too good,"
            " and the intervals are not corrected for that: confirm the verdicts on other questions."
        )
    return [
        pages.heading("The best arms" + (", judged on other questions" if choices[0].confirmed else "")),
        pages.paragraph(note, "note"),
        pages.bullets(choice.sentence() for choice in choices),
    ]


def _explanation(curves: Sequence[Curve]) -> str:
    questions = max(point.questions for curve in curves for point in curve.points)
    return (
        f"The curves use all {questions:,} questions and are not corrected for comparing {len(curves)} of them."
        " Removable: the share of heads at which the curve last falls one point below the baseline (arXiv 2504.03889)."
        f" Strict: the largest tested share that passes together with every smaller one; a share passes if the lower"
        f" end of the interval is above -{MARGIN:g} point and no recall is lost (crosses mark lost recall). It requires"
        f" {LEAST_QUESTIONS} questions, of which the model answers {LEAST_BASELINE:g} % correctly. “≥”: no larger share"
        " was tested. Accuracy up to a share is the mean under the curve; at least half of the curves reach that share."
        " Shares are measured shares of ablated heads, which differ from the quantile of a rule. Random arms are means"
        " over their seeds."
    )


def _strictest_first(curves: Sequence[Curve]) -> list[Curve]:
    """Return curves by falling strict share, random ones last; the order is kept among equals."""
    return sorted(curves, key=lambda curve: (curve.is_random, -(curve.removable_share_strict or 0.0)))


def _best(curves: Sequence[Curve]) -> str:
    """Return the headline of curves, by the strict share only."""
    best = curves[0]
    questions = max(point.questions for curve in curves for point in curve.points)
    if best.removable_share_strict is None:
        if questions < LEAST_QUESTIONS:
            return (
                f"{questions:,} questions cannot show that heads are removable within {MARGIN:g} point: at least"
                f" {LEAST_QUESTIONS} are needed. Sweep with more questions."
            )
        return "The model answers too few questions right to show that heads are removable."
    if not best.removable_share_strict:
        return "No score is shown to remove heads: the smallest tested share of each may lose more than one point."
    text = f"{best.name} removes most heads: {strict_text(best)}, with every smaller tested share passing"
    chance = next((curve for curve in curves if curve.is_random), None)
    return f"{text}." if chance is None else f"{text}; random heads: {strict_text(chance)}."


def _table(curves: Sequence[Curve]) -> str:
    upto = curves[0].area_upto
    return pages.table(
        [
            "score",
            "removable",
            "strict",
            "recall lost from",
            f"accuracy up to {percent(upto)}",
            "most ablated",
            "difference there",
            "shares",
        ],
        [
            [
                curve.name,
                removable_text(curve),
                strict_text(curve),
                percent(curve.recall_lost_at),
                percent(curve.area),
                percent(curve.reach),
                f"{100 * curve.points[-1].difference:+.2f}",
                str(len(curve.points) - 1),
            ]
            for curve in curves
        ],
    )
