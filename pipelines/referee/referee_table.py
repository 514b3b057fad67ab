"""Tables of a referee: what each criterion loses at each share, and how far criteria agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from headscan.analysis.criteria.criterion_points import CriterionPoint, by_curve
from headscan.analysis.criteria.rank_agreement import Agreement
from headscan.analysis.verdicts.controls import loss_increase
from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict
from headscan.pipelines.runs.text_tables import text_table


def referee_text(points: Sequence[CriterionPoint], controls: Sequence[ArmOutcome]) -> str:
    """Return a table for each measure, one row for each criterion.

    Args:
        controls: Arms of random heads; the means of each kind are a row.
    """
    arms = [*(point.arm for point in points), *controls]
    families = list(dict.fromkeys(each.family for arm in arms for each in arm.recall if each.informative))
    measures: list[tuple[str, Callable[[ArmOutcome], tuple[float, float, float] | None], str]] = [
        ("Increase of the text's loss, with 95 % intervals.", _loss, "+.3f"),
        ("Change of accuracy in points, with 95 % intervals.", _accuracy, "+.1f"),
    ]
    for family in families:
        measures.append((f"Left of {family}, in percent.", _recall(family), ".0f"))
    parts = []
    for title, value, digits in measures:
        if any(value(arm) is not None for arm in arms):
            parts.append(f"{title}\n\n" + text_table(_rows(points, controls, value, digits)))
    return "\n\n".join(parts)


def agreement_text(agreements: Sequence[Agreement]) -> str:
    """Return Kendall's tau of each pair of curves as a table."""
    names = list(dict.fromkeys(chain.from_iterable((each.first, each.second) for each in agreements)))
    found = {(each.first, each.second): each.tau for each in agreements}
    rows = [
        {"": str(number), "criterion": _name(first, names)}
        | {
            str(place): _tau(found.get((first, second), found.get((second, first))))
            for place, second in enumerate(names, 1)
        }
        for number, first in enumerate(names, 1)
    ]
    return "Kendall's tau-b of the shares at which heads go.\n\n" + text_table(rows)


def _rows(
    points: Sequence[CriterionPoint],
    controls: Sequence[ArmOutcome],
    value: Callable[[ArmOutcome], tuple[float, float, float] | None],
    digits: str,
) -> list[dict[str, str]]:
    shares = sorted({point.share for point in points})
    curves = by_curve(points)
    rows = []
    for curve, members in curves.items():
        at = {point.share: point.arm for point in members}
        cells = {_percent(share): _cell(value(at[share]), digits) if share in at else "" for share in shares}
        rows.append({"criterion": _name(curve, curves)} | cells)
    for kind in sorted({arm.kind for arm in controls}):
        of_kind = [arm for arm in controls if arm.kind is kind]
        means = {_percent(share): _mean(_of_share(of_kind, share), value, digits) for share in shares}
        rows.append({"criterion": f"{kind.label}, mean"} | means)
    return rows


def _name(curve: tuple[str, str], curves: Iterable[tuple[str, str]]) -> str:
    """Return the name of a curve, with its selection if another curve has the same criterion."""
    criterion, selection = curve
    return criterion if sum(other == criterion for other, _ in curves) == 1 else f"{criterion}, {selection}"


def _of_share(controls: Sequence[ArmOutcome], share: float) -> list[ArmOutcome]:
    return [arm for arm in controls if arm.share is not None and math.isclose(arm.share, share)]


def _mean(
    arms: Sequence[ArmOutcome], value: Callable[[ArmOutcome], tuple[float, float, float] | None], digits: str
) -> str:
    found = [each[0] for arm in arms if (each := value(arm)) is not None]
    return f"{sum(found) / len(found):{digits}}" if found else ""


def _loss(arm: ArmOutcome) -> tuple[float, float, float] | None:
    increase = loss_increase(arm.measures)
    return None if increase is None else (increase.difference, increase.low, increase.high)


def _accuracy(arm: ArmOutcome) -> tuple[float, float, float] | None:
    return (arm.paired.difference, arm.paired.low, arm.paired.high) if isinstance(arm, ArmVerdict) else None


def _recall(family: str) -> Callable[[ArmOutcome], tuple[float, float, float] | None]:
    def left(arm: ArmOutcome) -> tuple[float, float, float] | None:
        for each in arm.recall:
            if each.family == family and each.informative and each.paired.retained is not None:
                kept = each.paired.retained
                return kept.share, kept.low, kept.high
        return None

    return left


def _cell(value: tuple[float, float, float] | None, digits: str) -> str:
    if value is None:
        return ""
    middle, low, high = value
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{middle:{digits}}"
    return f"{middle:{digits}} [{low:{digits}}, {high:{digits}}]"


def _tau(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:g}%"
