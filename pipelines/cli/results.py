"""Results of verbs: rows and named facts, as text or as one JSON object; verdicts on arms as such rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from headscan.options import Option
from headscan.pipelines.runs.text_tables import plain, printable, say, show, text_table

if TYPE_CHECKING:
    from headscan.analysis.verdicts.verdict_rows import RecallVerdict
    from headscan.analysis.verdicts.verdict_words import ArmVerdict

#: Option of every verb that prints rows.
Json = Annotated[
    bool,
    Option(
        "one JSON object on standard output instead of text: `rows`, and facts such as `run_id`; notes and progress go "
        "to standard error"
    ),
]


@dataclass(frozen=True)
class Result:
    """Rows of a table (mappings or dataclasses with plain values) and further facts by name. ``text`` returns both as
    text and is called only without ``--json``; ``notes`` go to standard error after the result.
    """

    rows: Sequence[Any]
    text: Callable[[], str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def print(self, *, as_json: bool) -> None:
        """Print the result to standard output, safe for a terminal."""
        if as_json:
            document = json.dumps(plain({**self.facts, "rows": list(self.rows)}), allow_nan=False)
            print(printable(document) if sys.stdout.isatty() else document)
        else:
            show(self.text())
        for line in self.notes:
            say(line)


def arm_row(arm: ArmVerdict) -> dict[str, Any]:
    """Return the settings, the numbers and the verdict in words of an arm. Without tasks that have right answers,
    accuracy, `removable`, `outcome`, `label` and `why` are None.
    """
    accuracy = arm.accuracy
    judged = accuracy is not None
    return {
        "arm": arm.name,
        "kind": arm.kind,
        "control": arm.is_control,
        "share": arm.share,
        "zeroed_share": arm.zeroed_share,
        "selection": arm.selection,
        "replacement": arm.replacement,
        "removable": arm.is_safe if judged else None,
        "outcome": arm.outcome if judged else None,
        "label": arm.label if judged else None,
        "why": arm.why if judged else None,
        "accuracy": None if accuracy is None else {k: v for k, v in asdict(accuracy).items() if k != "retained"},
        "recall": [_recall(each) for each in arm.recall],
        "recall_unknown": arm.recall_unknown or None,
        "measures": [asdict(measure) for measure in arm.metrics],
        "weights_left": arm.weights_left,
        "cache_left": arm.cache_left,
        "verdict": arm.sentence(),
    }


def verdict_text(arms: Iterable[ArmVerdict]) -> str:
    """Return a table of the arms that are no controls, the reasons why arms are not safe, and the limits of verdicts.

    ``--json`` and the report have sentences with all numbers instead.
    """
    judged = [arm for arm in arms if not arm.is_control]
    rows = [_cells(arm) for arm in judged]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "verdict"))
    names += ["verdict"] * any("verdict" in row for row in rows)
    table = text_table([{name: row.get(name, "") for name in names} for row in rows])
    return "\n\n".join(filter(None, [_whole_model(judged[0]), table, verdict_notes(judged)])) if judged else ""


def verdict_notes(arms: Sequence[ArmVerdict]) -> str:
    """Return the reasons why arms are not safe, measures without a column, and the limits of verdicts."""
    from headscan.analysis.store.tables import LOSS
    from headscan.analysis.store.verdict_limits import limits_words

    notes = [(arm.name, [*([] if arm.accuracy is None else [arm.why]), *arm.other_metrics]) for arm in arms]
    lines = "\n".join(f"{name}: {'; '.join(filter(None, parts))}" for name, parts in notes if any(parts))
    judged = [arm for arm in arms if arm.accuracy is not None]
    of_text = (arm.max_loss for arm in judged for measure in arm.metrics if measure.metric == LOSS)
    limits = limits_words(next(of_text, None)) if judged else ""
    return "\n\n".join(filter(None, [lines, limits]))


def _whole_model(arm: ArmVerdict) -> str:
    """Return the numbers of the baseline, with which all arms are compared."""
    parts = []
    if arm.accuracy is not None:
        parts.append(f"accuracy {arm.accuracy.baseline:.1f} % on {arm.accuracy.questions:,} questions")
    parts += [f"{each.family} {each.paired.baseline:.1f} % on {each.paired.questions:,}" for each in arm.recall]
    if not arm.recall:
        parts.append("recall was not asked, so it may be lost")
    elif not arm.judged_recall:
        parts.append("too little recall to lose any, so its loss is unknown")
    return f"whole model: {', '.join(parts)}"


def _cells(arm: ArmVerdict) -> dict[str, str]:
    """Return the cells of one arm by column; what was not measured has none."""
    from headscan.analysis.store.tables import ACCURACY, LOSS

    cells = {"arm": arm.name, "heads": "" if arm.size is None else f"{arm.size:.1%}"}
    if (accuracy := arm.value(ACCURACY)) is not None:
        cells["accuracy"] = accuracy.words(1)
    if (loss := arm.value(LOSS)) is not None:
        cells["loss"] = loss.words(4)
    cells |= {each.family: each.numbers() for each in arm.judged_recall}
    if arm.accuracy is None:
        return cells
    if arm.controls is not None:
        cells["random worse"] = arm.controls.standing()
    return cells | {"verdict": arm.label}


def _recall(family: RecallVerdict) -> dict[str, Any]:
    return {**asdict(family), "failed": family.failed, "kept": family.kept, "informative": family.informative}
