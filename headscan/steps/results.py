"""Results of verbs: rows and named facts, as text or as one JSON object; verdicts on arms as such rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from headscan.options import Option
from headscan.text_tables import plain, printable, say, show

if TYPE_CHECKING:
    from headscan.verdicts.arm_verdict import ArmVerdict
    from headscan.verdicts.curves import Curve
    from headscan.verdicts.paired import PairedDifference

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


def run_line(run: Mapping[str, Any]) -> str:
    """Return a line about the run of the store, a row of ``runs``, that a verb reads."""
    corpus = f" on {run['corpus']}" if run["corpus"] else ""
    began = f"{run['started_at']:%Y-%m-%d %H:%M}"
    return f"from {run['kind']} {run['run_id']} of {run['model']}{corpus}, {began}, {run['status']}"


def arm_row(verdict: ArmVerdict) -> dict[str, Any]:
    """Return the settings, the numbers and the verdict in words of an arm. Without tasks that have right answers,
    accuracy, `safe`, `outcome`, `label` and `why` are None.
    """
    accuracy = verdict.accuracy
    is_judged = accuracy is not None
    return {
        "arm": verdict.name,
        "kind": verdict.kind,
        "control": verdict.kind.is_control,
        "share": verdict.arm.share,
        "ablated_share": verdict.arm.ablated_share,
        "selection": verdict.arm.selection,
        "replacement": verdict.arm.replacement,
        "safe": verdict.is_safe if is_judged else None,
        "outcome": verdict.outcome if is_judged else None,
        "label": verdict.label if is_judged else None,
        "why": verdict.why if is_judged else None,
        "accuracy": _numbers(accuracy, without=("retained",)),
        "expected": _numbers(verdict.expected, without=("retained",)),
        "recall": [
            {
                **asdict(family),
                "paired": _numbers(family.paired),
                "failed": family.failed,
                "kept": family.kept,
                "informative": family.informative,
            }
            for family in verdict.recall
        ],
        "recall_unknown": verdict.recall_unknown or None,
        "measures": [asdict(measure) for measure in verdict.metrics],
        "weights_left": verdict.arm.weights_left,
        "cache_left": verdict.arm.cache_left,
        "verdict": verdict.sentence(),
    }


def _numbers(paired: PairedDifference | None, without: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return a comparison without the ends for other numbers of comparisons."""
    if paired is None:
        return None
    return {name: value for name, value in asdict(paired).items() if name not in ("lows", "highs", *without)}


def curve_row(curve: Curve) -> dict[str, Any]:
    """Return a curve with its points, which have the names of the columns of ``sweep_points``."""
    return {**asdict(curve), "points": [point._asdict() for point in curve.points]}
