"""Markdown tables that are printed row by row.

A killed run shows its results so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from headscan.gpu_proof.checks import Outcome

CHECK_COLUMNS = ("group", "check", "comparisons", "largest error", "bound", "of", "seconds", "verdict")
#: Largest number of printed complaints of one check.
_MOST_COMPLAINTS = 6


class Table:
    """A Markdown table; its header is printed with its first row."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._title, self._columns = title, tuple(columns)
        self._begun = False

    def row(self, *cells: object) -> None:
        """Print a row; missing cells are empty."""
        if not self._begun:
            show(f"\n{self._title}\n\n{_line(self._columns)}\n{_line(['---'] * len(self._columns))}")
            self._begun = True
        show(_line([*cells, *[""] * (len(self._columns) - len(cells))]))


def show(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def cells_of(outcome: Outcome) -> tuple[object, ...]:
    """Return the cells of a check's row."""
    check, worst = outcome.check, outcome.worst
    error, bound, of = (f"{worst.error:.1e}", f"{worst.bound:.1e}", worst.what) if worst else ("", "", "")
    verdict = outcome.verdict
    if outcome.complaints:
        shown = "; ".join(outcome.complaints[:_MOST_COMPLAINTS])
        more = len(outcome.complaints) - _MOST_COMPLAINTS
        of = shown + (f"; and {more} more" if more > 0 else "")
    return check.group, check.name, outcome.compared, error, bound, of, f"{outcome.seconds:.1f}", verdict


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
