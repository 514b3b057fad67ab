"""The curves of a sweep: how accuracy falls as heads are silenced, and how many heads each score lets go."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import pages
from analysis.figures.curves import curves_figure
from analysis.figures.removable import removable_figure, removable_text, strict_text
from analysis.paired import LEAST_BASELINE, LEAST_QUESTIONS
from analysis.report_sections.numbers import percent
from analysis.sweeps import Curve, controls_of

_TITLES = {
    "rule": "Rules: heads chosen anew for each input",
    "mask": "Masks: heads chosen once, the same for every input",
}


def sweep_parts(curves: Sequence[Curve]) -> list[str]:
    """Of rules and of masks, as far as they were swept: the curves, the removable shares, and a table of both."""
    parts = [
        pages.paragraph(
            "Removable: the share of heads at which the curve last falls one point below the baseline (arXiv"
            " 2504.03889); by the stricter rule, at which the lower end of the interval does, but no further than the"
            f" last share before recall is lost (crosses), and only with {LEAST_QUESTIONS} questions or more, of which"
            f" the model is right on {LEAST_BASELINE:g} % or more. “≥”: the"
            " curve ends before. Accuracy up to a share, one that at least half of the curves reach, is the mean under"
            " the curve. Shares are of heads really silenced, which"
            " for a rule is not its quantile. Random arms are means over their seeds.",
            "note",
        )
    ]
    for kind, title in _TITLES.items():
        members = [curve for curve in curves if curve.kind in (kind, controls_of(kind))]
        if any(not curve.is_random for curve in members):
            parts += [pages.heading(title), pages.paragraph(_best(members))]
            parts.append(pages.figure(curves_figure(members), f"curves-{kind}"))
            parts += [pages.figure(removable_figure(members), f"removable-{kind}"), _table(members)]
    return parts


def _best(curves: Sequence[Curve]) -> str:
    best = curves[0]
    text = (
        f"{best.name} lets most heads go: {removable_text(best)} within one point; by the stricter rule"
        f" {strict_text(best)}"
    )
    chance = next((curve for curve in curves if curve.is_random), None)
    return f"{text}." if chance is None else f"{text}; random heads {removable_text(chance)}."


def _table(curves: Sequence[Curve]) -> str:
    upto = curves[0].area_upto
    return pages.table(
        [
            "score",
            "removable",
            "stricter",
            "recall lost from",
            f"accuracy up to {percent(upto)}",
            "most silenced",
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
