"""Verdicts on arms as a table: for a terminal, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from headscan.store.tables import ACCURACY, LOSS
from headscan.store.verdict_limits import limits_words
from headscan.text_tables import counted, html_table, percent, text_table
from headscan.verdicts.arm_verdict import EXPECTED_ACCURACY, ArmVerdict


def verdict_text(arms: Iterable[ArmVerdict]) -> str:
    """Return a table of the arms that are no controls, the reasons why arms are not safe, and the limits of verdicts.

    ``--json`` and the report have sentences with all numbers instead.
    """
    listed = [arm for arm in arms if not arm.kind.is_control]
    if not listed:
        return ""
    paragraphs = [_whole_model(listed[0]), text_table(_table_rows(listed)), verdict_notes(listed)]
    return "\n\n".join(filter(None, paragraphs))


def verdict_html(arms: Iterable[ArmVerdict]) -> str:
    """Return `verdict_text` as HTML."""
    listed = [arm for arm in arms if not arm.kind.is_control]
    if not listed:
        return ""
    notes = escape(verdict_notes(listed)).replace("\n", "<br>")
    return f"<p>{escape(_whole_model(listed[0]))}</p>{html_table(_table_rows(listed))}<p>{notes}</p>"


def verdict_notes(arms: Sequence[ArmVerdict]) -> str:
    """Return the reasons why arms are not safe, measures without a column, and the limits of verdicts."""
    lines = []
    for arm in arms:
        notes = arm.other_metrics if arm.accuracy is None else [arm.why, *arm.other_metrics]
        if any(notes):
            lines.append(f"{arm.name}: {'; '.join(filter(None, notes))}")
    judged = [arm for arm in arms if arm.accuracy is not None]
    loss_limits = (arm.max_loss for arm in judged for measure in arm.metrics if measure.metric == LOSS)
    limits = limits_words(next(loss_limits, None), judged[0].max_points) if judged else ""
    return "\n\n".join(filter(None, ["\n".join(lines), limits]))


def _whole_model(arm: ArmVerdict) -> str:
    """Return the numbers of the baseline, with which all arms are compared."""
    numbers = []
    if arm.accuracy is not None:
        numbers.append(f"accuracy {arm.accuracy.baseline:.1f} % on {counted(arm.accuracy.questions, 'question')}")
    numbers += [f"{each.family} {each.paired.baseline:.1f} % on {each.paired.questions:,}" for each in arm.recall]
    if not arm.recall:
        numbers.append("recall was not asked, so it may be lost")
    elif not arm.judged_recall:
        numbers.append("too little recall to lose any, so its loss is unknown")
    return f"whole model: {', '.join(numbers)}"


def _table_rows(arms: Sequence[ArmVerdict]) -> list[dict[str, str]]:
    """Return the cells of arms, with the same columns in each row and the verdict last."""
    rows = [_arm_cells(arm) for arm in arms]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "verdict"))
    names += ["verdict"] * any("verdict" in row for row in rows)
    return [{name: row.get(name, "") for name in names} for row in rows]


def _arm_cells(verdict: ArmVerdict) -> dict[str, str]:
    """Return the cells of one arm by column; what was not measured has none."""
    cells = {"arm": verdict.name, "heads": "" if (size := verdict.arm.size) is None else percent(size)}
    if (accuracy := verdict.value(ACCURACY)) is not None:
        cells["accuracy"] = accuracy.words(1)
    if (expected := verdict.value(EXPECTED_ACCURACY)) is not None:
        cells["expected"] = expected.words(1)
    if (loss := verdict.value(LOSS)) is not None:
        cells["loss"] = loss.words(4)
    cells |= {each.family: each.numbers() for each in verdict.judged_recall}
    if verdict.accuracy is None:
        return cells
    if verdict.controls is not None:
        cells["random worse"] = verdict.controls.standing()
    return cells | {"verdict": verdict.label}
