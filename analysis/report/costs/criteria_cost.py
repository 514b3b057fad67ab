"""Report section on criteria: what each loses when it ablates a share of the heads, and how far they agree."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.effects.criterion_points import CriterionPoint, by_curve, criterion_points
from headscan.analysis.report.figures.pruning_chart import PrunedPoint, pruning_figure
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.controls import loss_increase
from headscan.analysis.verdicts.judge import ArmOutcome, Verdict

IDENTITY = "criteria"

_NOTE = (
    "Every criterion chose heads on the same texts; these heads are ablated, and all arms answer the same questions."
    " Differences to the model without ablation, with 95 % intervals. Random heads of the same number are controls."
    " Dashed lines: one point of accuracy, and 90 % of the model's recall above chance."
)


def criteria_section(store: Store, verdict: Verdict) -> str | None:
    """Return the section on a referee's masks; None if the evaluation has none."""
    points = [point for point in criterion_points(store, verdict) if point.arm.kind is ArmKind.MASK]
    if not points:
        return None
    controls = [arm for arm in (*verdict.arms, *verdict.unjudged) if arm.kind is ArmKind.RANDOM_MASK]
    drawn = [_drawn(point.arm, point.criterion, point.selection) for point in points]
    drawn += [_drawn(arm, "random", points[0].selection) for arm in controls]
    parts = [pages.paragraph(_NOTE, "note"), pages.figure(pruning_figure(drawn), "criteria")]
    parts += [pages.heading("Loss increase by share, in nats per token"), _losses(points, controls)]
    return pages.section("Which criterion loses least", parts, IDENTITY)


def _drawn(arm: ArmOutcome, method: str, selection: str) -> PrunedPoint:
    return PrunedPoint(arm, method, arm.zeroed_share or arm.share or 0.0, (), selection)


def _losses(points: Sequence[CriterionPoint], controls: Sequence[ArmOutcome]) -> str:
    shares = sorted({point.share for point in points})
    rows = []
    for (criterion, selection), members in by_curve(points).items():
        at = {point.share: point.arm for point in members}
        rows.append([criterion, selection, *(_increase([at[share]]) if share in at else "–" for share in shares)])
    if controls:
        of_share = {share: [arm for arm in controls if arm.share == share] for share in shares}
        rows.append(["random heads, mean", "control", *(_increase(of_share[share]) for share in shares)])
    return pages.table(["criterion", "chosen on", *(f"{100 * share:g}%" for share in shares)], rows)


def _increase(arms: Sequence[ArmOutcome]) -> str:
    """Return the mean loss increase of arms, with the interval of a single one."""
    found = [increase for arm in arms if (increase := loss_increase(arm.measures)) is not None]
    if not found:
        return "–"
    if len(found) == 1 and found[0].documents > 1:
        return f"{found[0].difference:+.3f} [{found[0].low:+.3f}, {found[0].high:+.3f}]"
    return f"{sum(each.difference for each in found) / len(found):+.3f}"
