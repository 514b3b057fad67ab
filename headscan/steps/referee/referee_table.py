"""Results of a referee: losses by criterion and share, and how far criteria agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from headscan.catalog import RANDOM
from headscan.store.tables import ACCURACY, BLEU, LOSS
from headscan.text_tables import counted, percent, text_table
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.criterion_points import ALL_SITES, Agreement, CriterionPoint, SitePoint, agreements, by_curve
from headscan.verdicts.metrics import METRICS

#: Title of a measure's table; all others are recall families.
_TITLES = {
    LOSS: "Increase of the text's loss, with 95 % intervals.",
    ACCURACY: "Change of accuracy in points, with 95 % intervals.",
    BLEU: "Change of BLEU, with 95 % intervals.",
}


@dataclass(frozen=True)
class CriterionLoss:
    """The change of one measure if a criterion removes a share of the heads: a row of the result.

    Attributes:
        measure: ``loss``, ``accuracy``, ``bleu`` or the name of a recall family.
        site: Kind of attention whose heads are removed, or ``all``.
        criterion: Name of the criterion, with its selection if another curve has the same; kind of random heads.
        selection: Further settings of the choice and the repair; empty for random heads.
        share: Nominal share of the site's heads that are removed, 0 to 1.
        value: Increase of the loss, change of accuracy or BLEU, or what is left of recall; for random heads the mean.
        low, high: 95 % interval; None for a mean, or with one document.
    """

    measure: str
    unit: str
    site: str
    criterion: str
    selection: str
    share: float
    value: float
    low: float | None
    high: float | None


def criterion_losses(points: Sequence[CriterionPoint], controls: Sequence[ArmVerdict]) -> list[CriterionLoss]:
    """Return the losses by measure, criterion and share, then the means of each kind of random heads (``controls``)."""
    rows = []
    for measure, unit in _measures(points, controls).items():
        rows += _of_criteria(points, measure, unit) + _of_random(points, controls, measure, unit)
    return rows


def referee_text(losses: Sequence[CriterionLoss]) -> str:
    """Return a table for each measure and site, one row for each criterion."""
    parts = []
    shares = sorted({row.share for row in losses})
    sites = dict.fromkeys(row.site for row in losses)
    for name, site in dict.fromkeys((row.measure, row.site) for row in losses):
        curves: dict[str, dict[float, CriterionLoss]] = {}
        for row in losses:
            if (row.measure, row.site) == (name, site):
                curves.setdefault(row.criterion, {})[row.share] = row
        title = _TITLES.get(name, f"Left of {name}, in percent.")
        digits = f"+.{METRICS[name].digits}f" if name in METRICS else ".0f"
        title += f" {_heads_of(site)}" * (len(sites) > 1)
        table = [
            {"criterion": criterion}
            | {percent(share): _cell(at[share], digits) if share in at else "" for share in shares}
            for criterion, at in curves.items()
        ]
        parts.append(f"{title}\n\n" + text_table(table))
    return "\n\n".join(parts)


def agreement_text(agreements: Sequence[Agreement]) -> str:
    """Return Kendall's tau of each pair of curves as a table for each site."""
    sites = dict.fromkeys(agreement.site for agreement in agreements)
    parts = []
    for site in sites:
        title = "Kendall's tau-b of the shares at which heads go." + f" {_heads_of(site)}" * (len(sites) > 1)
        parts.append(f"{title}\n\n" + _tau_table([agreement for agreement in agreements if agreement.site == site]))
    return "\n\n".join(parts)


def _heads_of(site: str) -> str:
    return "Heads of all sites." if site == ALL_SITES else f"Heads of {site} attention."


def _tau_table(agreements: Sequence[Agreement]) -> str:
    names = list(dict.fromkeys(chain.from_iterable((agreement.first, agreement.second) for agreement in agreements)))
    taus = {(agreement.first, agreement.second): agreement.tau for agreement in agreements}
    rows = [
        {"": str(number), "criterion": _curve_name(first, names)}
        | {
            str(place): _tau(taus.get((first, second), taus.get((second, first))))
            for place, second in enumerate(names, 1)
        }
        for number, first in enumerate(names, 1)
    ]
    return text_table(rows)


def _measures(points: Sequence[CriterionPoint], controls: Sequence[ArmVerdict]) -> dict[str, str]:
    """Return the unit of each measure that an arm has."""
    arms = [*(point.verdict for point in points), *controls]
    families = dict.fromkeys(recall.family for arm in arms for recall in arm.judged_recall)
    unit = next((increase.unit for arm in arms if (increase := loss_increase(arm.metrics)) is not None), "")
    known = {LOSS: unit, ACCURACY: "points", **dict.fromkeys(families, "percent left")}
    return {name: unit for name, unit in known.items() if any(arm.value(name) is not None for arm in arms)}


def _of_criteria(points: Sequence[CriterionPoint], measure: str, unit: str) -> list[CriterionLoss]:
    curves = by_curve(points)
    return [
        CriterionLoss(
            measure,
            unit,
            "self",
            _curve_name(curve, curves),
            curve[1],
            point.share,
            change.value,
            _finite(change.low),
            _finite(change.high),
        )
        for curve, members in curves.items()
        for point in members
        if (change := point.verdict.value(measure)) is not None
    ]


def _of_random(
    points: Sequence[CriterionPoint], controls: Sequence[ArmVerdict], measure: str, unit: str
) -> list[CriterionLoss]:
    rows = []
    for kind in sorted({arm.kind for arm in controls}):
        for share in sorted({point.share for point in points}):
            drawn = [each for each in controls if each.kind is kind and math.isclose(each.arm.share or 0.0, share)]
            changes = [change.value for each in drawn if (change := each.value(measure)) is not None]
            if changes:
                mean, name = sum(changes) / len(changes), f"{kind.label}, mean"
                rows.append(CriterionLoss(measure, unit, "self", name, "", share, mean, None, None))
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _curve_name(curve: tuple[str, str], curves: Iterable[tuple[str, str]]) -> str:
    """Return the name of a curve, with its selection if another curve has the same criterion."""
    criterion, selection = curve
    return criterion if sum(other == criterion for other, _ in curves) == 1 else f"{criterion}, {selection}"


def _cell(row: CriterionLoss, digits: str) -> str:
    if row.low is None or row.high is None:
        return f"{row.value:{digits}}"
    return f"{row.value:{digits}} [{row.low:{digits}}, {row.high:{digits}}]"


def _tau(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def site_losses(points: Sequence[SitePoint]) -> list[CriterionLoss]:
    """Return what each criterion changes by site and share; the means of random orders follow the criteria."""
    rows = []
    for site in dict.fromkeys(point.site for point in points):
        of_site = [point for point in points if point.site == site]
        rows += [_criterion_loss(point) for point in of_site if point.criterion != RANDOM]
        rows += _random(of_site)
    return rows


def baseline_text(points: Sequence[SitePoint]) -> str:
    """Return the metric of the model without ablation."""
    first = points[0]
    metric = METRICS[first.metric]
    shown = f"{metric.scale * first.effect.baseline:.{metric.digits + 1}f}"
    unit = {ACCURACY: " %", LOSS: " nats per token"}.get(first.metric, "")
    return f"Without ablation: {first.metric} {shown}{unit} on {counted(first.effect.n, 'example')}."


def site_agreements(points: Sequence[SitePoint], heads: Sequence[tuple[str, int, int]]) -> list[Agreement]:
    """Return the agreement of every pair of criteria at every site; ``heads`` are all heads of the model."""
    pairs = []
    for site in dict.fromkeys(point.site for point in points):
        of_site = [point for point in points if point.site == site and point.criterion != RANDOM]
        pairs += agreements(of_site, [head for head in heads if site in (head[0], ALL_SITES)], site)
    return pairs


def _criterion_loss(point: SitePoint) -> CriterionLoss:
    metric, effect = METRICS[point.metric], point.effect
    low, high = (metric.scale * end if math.isfinite(end) else None for end in (effect.low, effect.high))
    return CriterionLoss(
        point.metric, metric.unit, point.site, point.criterion, "", point.share, metric.scale * effect.effect, low, high
    )


def _random(points: Sequence[SitePoint]) -> Iterator[CriterionLoss]:
    curves = by_curve([point for point in points if point.criterion == RANDOM]).values()
    for of_share in zip(*curves, strict=True):
        first = of_share[0]
        metric = METRICS[first.metric]
        mean = sum(metric.scale * point.effect.effect for point in of_share) / len(of_share)
        yield CriterionLoss(
            first.metric, metric.unit, first.site, "random heads, mean", "", first.share, mean, None, None
        )
