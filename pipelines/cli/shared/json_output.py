"""Results of verbs: rows and named facts, shown as text or as one JSON object."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from decimal import Decimal
from typing import Any

from headscan.pipelines.cli.shared.options import say
from headscan.pipelines.runs.text_tables import printable, show


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option of JSON instead of text."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object on standard output instead of text: `rows`, and facts such as `run_id`; notes and "
        "progress go to standard error",
    )


@dataclass(frozen=True)
class Result:
    """Rows of a table and facts about them.

    Attributes:
        rows: Rows as mappings or dataclasses, with plain values.
        text: Returns the same as text; called only without ``--json``.
        facts: Further values by name, such as the id of the run.
        notes: Lines for standard error after the result.
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


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: NaN and infinity become null, and other types become text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return [plain(each) for each in sorted(value)]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
