"""Tables for a terminal, safe from control characters in stores, corpora and models, and for notebooks."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from decimal import Decimal
from html import escape
from typing import Any

#: Control characters (C0, DEL, C1), line separators, marks that change the direction of text, and lone surrogates:
#: they move the cursor, recolour or retitle a terminal, or make text read as something else.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a regular noun."""
    return f"{noun}es" if noun.endswith(("ch", "sh", "x", "s")) else f"{noun}s"


def percent(share: float | None) -> str:
    """Return a share, 0 to 1, with at most three digits and two decimals, as in ``12.5 %`` or ``25 %``; a dash for
    None.
    """
    if share is None:
        return "–"
    value = 100 * share
    decimals = max(0, min(2, 3 - len(f"{abs(value):.0f}")))
    text = f"{value:z,.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} %"


def printable(text: str) -> str:
    r"""Return ``text`` with every unsafe character escaped, as in ``\x1b``; line ends are unsafe, too."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """Return ``printable`` of each line and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def show(text: str) -> None:
    """Print lines to standard output, safe for a terminal."""
    print(printable_lines(text))


def say(line: str) -> None:
    """Print a line to standard error; standard output is for results."""
    print(printable_lines(line), file=sys.stderr, flush=True)


def text_table(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None, *, keep: Sequence[str] | None = None
) -> str:
    """Return rows as a terminal-safe table with right-aligned numbers. ``names`` are its columns, by default those of
    the first row; ``keep`` are those to keep longest if the terminal is too narrow, and None prints all columns.
    """
    names = list(names if names is not None else rows[0] if rows else [])
    cells = {name: [_cell_text(row[name]) for row in rows] for name in names}
    titles = {name: printable(name) for name in names}
    widths = {name: max(map(len, [titles[name], *cells[name]])) for name in names}
    note = ""
    if keep is not None:
        room = shutil.get_terminal_size((160, 24)).columns
        shown: set[str] = set()
        for name in dict.fromkeys([*keep, *names]):
            room -= widths[name] + 2
            if shown and room < -2:
                break
            shown.add(name)
        if len(shown) < len(names):
            note = f"\n... columns that do not fit: {len(names) - len(shown)}. Select fewer columns, or write CSV"
        names = [name for name in names if name in shown]
    right = {name: all(isinstance(row[name], (int, float)) or row[name] is None for row in rows) for name in names}

    def line(texts: Mapping[str, str]) -> str:
        return "  ".join(
            texts[name].rjust(widths[name]) if right[name] else texts[name].ljust(widths[name]) for name in names
        ).rstrip()

    head = line(titles)
    body = [line({name: cells[name][i] for name in names}) for i in range(len(rows))]
    return "\n".join([head, "  ".join("-" * widths[name] for name in names), *body]) + note


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table; its columns are those of the first row."""
    lines = [list(rows[0]) if rows else [], *(row.values() for row in rows)]
    head, *body = ("".join(f"<td>{escape(_cell_text(value))}</td>" for value in line) for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"


def html_text(text: str) -> str:
    """Return text as HTML with its line ends and columns."""
    return f'<pre style="white-space: pre">{escape(printable_lines(text))}</pre>'


def table_cells(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str | Callable[[Mapping[str, Any]], Any]]
) -> list[dict[str, Any]]:
    """Return the cells of a table; ``columns`` maps each title to the name of a value or a function of the row."""
    return [
        {title: row[value] if isinstance(value, str) else value(row) for title, value in columns.items()}
        for row in rows
    ]


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


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
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value)]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
