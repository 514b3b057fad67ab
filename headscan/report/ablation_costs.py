"""Report sections on the costs of ablating heads: arms, sweeps, criteria and sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headscan.catalog import RANDOM
from headscan.report import page_parts as pages
from headscan.report.arm_chart import (
    FRAME,
    arms_figure,
    recall_figure,
    safe_text,
    share_figure,
    shares_figure,
    within_point_text,
)
from headscan.report.share_chart import ArmPoint, curves_figure, pruning_figure, site_figure
from headscan.store.provenance import same_model
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.store.tables import LOSS
from headscan.store.verdict_limits import MARGIN, MIN_ABOVE_CHANCE, MIN_RETAINED, MIN_SAFE_TEXTS, points_words
from headscan.text_tables import counted, percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.confirmation import SweepChoice, judge_sweep
from headscan.verdicts.criterion_points import (
    ALL_SITES,
    CriterionPoint,
    SitePoint,
    by_curve,
    criterion_points,
    read_site_points,
)
from headscan.verdicts.curves import Curve, is_sweep, read_curves
from headscan.verdicts.judge import Verdict
from headscan.verdicts.metrics import METRICS

_TITLES = {
    ArmKind.RULE: "Rules: heads chosen again for each input",
    ArmKind.MASK: "Masks: heads chosen once, the same for every input",
}


def sweep_parts(curves: Sequence[Curve], choices: Sequence[SweepChoice] = ()) -> list[str]:
    """Return the curves of a sweep's rules and masks, with tables."""
    parts = _selected(choices) if choices else []
    parts.append(pages.paragraph(_explanation(curves), "note"))
    for kind, title in _TITLES.items():
        members = [curve for curve in curves if curve.kind in (kind, kind.control)]
        members.sort(key=lambda curve: (curve.is_random, -(curve.safe_share or 0.0)))
        if any(not curve.is_random for curve in members):
            parts += [pages.heading(title), pages.paragraph(_best(members))]
            parts.append(pages.figure(curves_figure(members), f"curves-{kind}"))
            parts += [pages.figure(shares_figure(members), f"shares-{kind}"), _curve_table(members)]
    return parts


def _selected(choices: Sequence[SweepChoice]) -> list[str]:
    if choices[0].confirmed:
        note = (
            "Half of the questions of each task and one of four recall texts select the best rule and the best mask."
            " The others judge them, so each interval is as valid as that of an arm chosen in advance: an arm that"
            f" truly loses more than {MARGIN:g} point is called safe in at most about 2.5 % of sweeps. All arms"
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
        " Within one point: the share of heads at which the curve last falls one point below the baseline (arXiv"
        " 2504.03889). Safe: the largest tested share that is safe together with every smaller one; a share is safe if"
        " the lower end of the interval (of the expected accuracy, if answers are choices) is above"
        f" -{MARGIN:g} point and no recall is lost (crosses mark lost recall)."
        f" It requires {MIN_SAFE_TEXTS} questions, of which the model answers {MIN_ABOVE_CHANCE:g} % correctly. “≥”: no"
        " larger share was tested. Accuracy up to a share is the mean under the curve; at least half of the curves"
        " reach that share. Shares are measured shares of ablated heads, which differ from the quantile of a rule."
        " Random arms are"
        " means over their seeds."
    )


def _best(curves: Sequence[Curve]) -> str:
    """Return the headline of curves, by the safe share only."""
    best = curves[0]
    texts = max(point.texts for curve in curves for point in curve.points)
    if best.safe_share is None:
        if texts < MIN_SAFE_TEXTS:
            return (
                f"{counted(texts, 'question')} cannot show that an arm is safe within {MARGIN:g} point: at least"
                f" {MIN_SAFE_TEXTS} are needed. Sweep with more questions."
            )
        return "The model answers too few questions right to show that an arm is safe."
    if not best.safe_share:
        return "No score is shown to remove heads: the smallest tested share of each may lose more than one point."
    text = f"{best.name} removes most heads: {safe_text(best)}, with every smaller tested share safe, too"
    chance = next((curve for curve in curves if curve.is_random), None)
    return f"{text}." if chance is None else f"{text}; random heads: {safe_text(chance)}."


def _curve_table(curves: Sequence[Curve]) -> str:
    upto = curves[0].area_upto
    return pages.columns(
        curves,
        {
            "score": lambda curve: curve.name,
            "within one point": within_point_text,
            "safe": safe_text,
            "recall lost from": lambda curve: percent(curve.recall_lost_at),
            f"accuracy up to {percent(upto)}": lambda curve: percent(curve.area),
            "most ablated": lambda curve: percent(curve.reach),
            "difference there": lambda curve: f"{100 * curve.points[-1].difference:+.2f}",
            "shares": lambda curve: str(len(curve.points) - 1),
        },
    )


ABLATION = "ablation"

#: With more arms the list of arms is folded; the curves summarise it.
_MOST_UNFOLDED = 20

#: Definition of the difference in every figure and table of the section.
_DIFFERENCE = (
    "on the same questions, with 95 % intervals (Gaffke's bound over independent texts) and McNemar's exact test. The"
    f" dashed line is {points_words(MARGIN)} below the baseline. Answers among choices are judged by the expected"
    " accuracy, the mean probability of the right choice, others by the count. An arm is safe if the whole interval of"
    " that lies above the limit, the count shows no larger loss, and no single task loses more, with intervals widened"
    " for the number of tasks."
)
_RECALL = (
    "Recall left is the share of what the model itself recalls beyond guessing. A safe arm keeps at least"
    f" {MIN_RETAINED:.0f} % of it, and is not shown to lose more than {points_words(MARGIN)} of the recall answers."
)

#: Above the verdicts on all arms of a sweep.
_NOT_CORRECTED = (
    "These verdicts use all questions and treat each arm as if it had been chosen in advance. They are too optimistic"
    " for the best of many arms, whose verdict is above."
)


def arms_section(
    store: Store, evaluation: Mapping[str, Any], verdict: Verdict, choices: Sequence[SweepChoice] | None = None
) -> str:
    """Return the section of an evaluate run. None for ``choices``, the selected arms of a sweep with their verdicts,
    selects and judges them on different questions.
    """
    tasks = evaluation["corpus"]
    on = f" on {tasks}" if tasks else ""
    if verdict.arms:
        note = f"Differences to the baseline{on}, {_DIFFERENCE}"
        note += f" {_RECALL}" if any(arm.recall for arm in verdict.arms) else ""
    else:
        note = f"Arms{on}: no task has right answers, so there is no accuracy to compare."
    parts = [pages.paragraph(note, "note")]
    if verdict.progress:
        parts.append(pages.paragraph(f"{verdict.progress}: the curves and verdicts cover only these.", "warning"))
    curves = read_curves(store, evaluation["run_id"], verdict.unrecorded)
    swept = is_sweep(curves)
    if swept:
        parts += sweep_parts(curves, judge_sweep(store, verdict) if choices is None else choices)
    parts += _recall_parts(verdict)
    sentences = verdict.sentences()
    # The arms of a sweep are points of its curves; a row for each arm would fill pages.
    arms = [
        *([] if swept else _drawn(verdict)),
        *([pages.paragraph(_NOT_CORRECTED, "note")] if swept else []),
        *([pages.heading("Verdicts"), pages.bullets(sentences)] if sentences else []),
        *(_arm_table(verdict) if verdict.arms else []),
    ]
    if len(verdict.arms) > _MOST_UNFOLDED:
        parts.append(pages.folded(f"All {len(verdict.arms)} arms, one by one", "\n".join(arms)))
    else:
        parts += arms
    ablates = all(arm.kind.ablates for arm in verdict.by_name.values())
    return pages.section("What ablating heads costs" if ablates else "What each arm costs", parts, ABLATION)


def _recall_parts(verdict: Verdict) -> list[str]:
    plot = recall_figure(verdict)
    if plot is None:
        return []
    note = (
        "Each point is an arm: its difference in the recall tasks over its difference in the benchmark, in points. A"
        " benchmark of short questions does not show the loss of retrieval heads (arXiv 2404.15574): arms at the lower"
        " right keep the benchmark and lose recall."
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
    chosen = (each.arm for each in verdict.arms if not each.kind.is_random)
    shares = {round(arm.ablated_share, 3) for arm in chosen if arm.ablated_share}
    if len(shares) > 2:
        parts.append(pages.figure(share_figure(verdict), "arms-by-share"))
    return parts


def _arm_table(verdict: Verdict) -> list[str]:
    families = list(dict.fromkeys(recall.family for arm in verdict.arms for recall in arm.judged_recall))
    several = any(len(arm.tasks) > 1 for arm in verdict.arms)
    cells: dict[str, Callable[[ArmVerdict], str]] = {
        "arm": lambda arm: arm.name,
        "kind": lambda arm: arm.kind.label,
        "ablated": lambda each: percent(each.arm.ablated_share or None),
        "questions": lambda arm: f"{arm.paired.questions:,}",
        "accuracy": lambda arm: f"{arm.paired.arm:.2f}",
        "difference": lambda arm: f"{arm.paired.difference:+.2f}",
        "95 % interval": lambda arm: f"{arm.paired.low:+.2f} to {arm.paired.high:+.2f}",
        "p": lambda arm: f"{arm.paired.p_value:.3g}",
    }
    if any(arm.expected is not None for arm in verdict.arms):
        cells["expected"] = lambda arm: "–" if arm.expected is None else arm.expected.interval.words()
    if several:
        cells["worst task"] = lambda arm: arm.tasks[0].points() if arm.tasks else "–"
    cells |= {f"{family} left": partial(recall_share, family) for family in families}
    baseline = verdict.arms[0].paired.baseline
    progress = f"; {verdict.progress}" if verdict.progress else ""
    return [
        pages.columns(verdict.arms, cells, texts=2),
        pages.paragraph(
            f"Accuracy in %, baseline {baseline:.2f}; differences in points{progress}."
            + " Worst task: the task with the clearest loss." * several,
            "note",
        ),
    ]


def recall_share(family: str, arm: ArmVerdict) -> str:
    """Return the share of a recall family that is left, as a cell."""
    return next((each.share_words() for each in arm.judged_recall if each.family == family), "–")


SITES = "sites"

_SITE_NOTE = (
    "Every criterion removes the heads of one kind of attention, or of all; their outputs are zero. Other examples than"
    " those that judge give the order. Whiskers are 95 % intervals of the paired change; broken lines: random orders."
)


def site_section(store: Store, scan: Mapping[str, Any]) -> str | None:
    """Return the section on the newest finished comparison of the scan's model; None without one."""
    for run in store.runs("ablate"):
        finished = run["status"] == "finished" and same_model(run, scan)
        if finished and (points := read_site_points(store, run["run_id"])):
            return _site_parts(run, points)
    return None


def _site_parts(run: Mapping[str, Any], points: Sequence[SitePoint]) -> str:
    first = points[0]
    title, scale, digits, _ = METRICS[first.metric]
    baseline = f"Run {run['run_id']} on {run['corpus']}: {title} {scale * first.effect.baseline:.{digits}f} without"
    parts = [
        pages.paragraph(_SITE_NOTE, "note"),
        pages.paragraph(f"{baseline} ablation, on {counted(first.effect.n, 'example')}."),
    ]
    parts.append(pages.figure(site_figure(points), "criteria-by-site"))
    for site in dict.fromkeys(point.site for point in points):
        name = "all sites" if site == ALL_SITES else f"{site} attention"
        parts.append(pages.heading(f"Change of {title}, heads of {name}"))
        parts.append(_site_table([point for point in points if point.site == site]))
    return pages.section("Which criterion loses least, by site", parts, SITES)


def _site_table(points: Sequence[SitePoint]) -> str:
    shares, metric = sorted({point.share for point in points}), METRICS[points[0].metric]
    rows = []
    for (criterion, seed), members in by_curve(points).items():
        change = {point.share: point.effect.interval.scaled(metric.scale) for point in members}
        cells = [change[share].words(metric.digits) if share in change else "–" for share in shares]
        rows.append([f"{criterion}, {seed}" if criterion == RANDOM else criterion, *cells])
    return pages.table(["criterion", *map(percent, shares)], rows)


CRITERIA = "criteria"

_CRITERIA_NOTE = (
    "Every criterion chose heads on the same texts; these heads are ablated, and all arms answer the same questions."
    " Differences to the model without ablation, with 95 % intervals. Random heads of the same number are controls."
    " Dashed lines: one point of accuracy, and 90 % of what the model recalls beyond guessing."
)


def criteria_section(store: Store, verdict: Verdict) -> str | None:
    """Return the section on a referee's masks; None if the evaluation has none."""
    points = [point for point in criterion_points(store, verdict) if point.verdict.kind is ArmKind.MASK]
    if not points:
        return None
    controls = [arm for arm in verdict.by_name.values() if arm.kind is ArmKind.RANDOM_MASK]
    drawn = [_arm_point(point.verdict, point.criterion, point.selection) for point in points]
    drawn += [_arm_point(arm, "random", points[0].selection) for arm in controls]
    parts = [pages.paragraph(_CRITERIA_NOTE, "note"), pages.figure(pruning_figure(drawn), "criteria")]
    parts += [pages.heading("Loss increase by share, in nats per token"), _losses(points, controls)]
    return pages.section("Which criterion loses least", parts, CRITERIA)


def _arm_point(verdict: ArmVerdict, method: str, selection: str) -> ArmPoint:
    return ArmPoint(verdict, method, verdict.arm.ablated_share or verdict.arm.share or 0.0, (), selection)


def _losses(points: Sequence[CriterionPoint], controls: Sequence[ArmVerdict]) -> str:
    shares = sorted({point.share for point in points})
    rows = []
    for (criterion, selection), members in by_curve(points).items():
        at = {point.share: point.verdict for point in members}
        rows.append([criterion, selection, *(_increase([at[share]]) if share in at else "–" for share in shares)])
    if controls:
        of_share = {share: [each for each in controls if each.arm.share == share] for share in shares}
        rows.append(["random heads, mean", "control", *(_increase(of_share[share]) for share in shares)])
    return pages.table(["criterion", "chosen on", *map(percent, shares)], rows)


def _increase(arms: Sequence[ArmVerdict]) -> str:
    """Return the mean loss increase of arms, with the interval of a single one."""
    increases = [increase for arm in arms if (increase := arm.value(LOSS)) is not None]
    if not increases:
        return "–"
    return (
        increases[0].words(3)
        if len(increases) == 1
        else f"{sum(each.value for each in increases) / len(increases):+.3f}"
    )
