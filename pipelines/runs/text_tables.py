"""Tables and progress for a terminal or a log, safe from control characters in stores, corpora and models."""

from __future__ import annotations

import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from decimal import Decimal
from typing import Any, Self, TextIO

from tqdm import tqdm
from tqdm.auto import tqdm as widget_bar

#: Control characters (C0, DEL, C1), line separators, marks that change the direction of text, and lone surrogates:
#: they move the cursor, recolour or retitle a terminal, or make text read as something else.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return ``text`` with every unsafe character escaped, as in ``\x1b``; line ends are unsafe, too."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """Return ``printable`` of each line and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def show(text: str) -> None:
    """Print lines to standard output, safe for a terminal."""
    print(printable_lines(text))


def text_table(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None, *, keep: Sequence[str] | None = None
) -> str:
    """Return rows as a terminal-safe table with right-aligned numbers.

    Args:
        names: Columns; None uses those of the first row.
        keep: Columns to keep longest if the terminal is too narrow for all; None prints all columns.
    """
    names = list(names if names is not None else rows[0] if rows else [])
    cells = {name: [_text(row[name]) for row in rows] for name in names}
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
            note = f"\n... {len(names) - len(shown)} more columns do not fit. Select fewer columns, or write CSV"
        names = [name for name in names if name in shown]
    right = {name: all(isinstance(row[name], (int, float)) or row[name] is None for row in rows) for name in names}

    def line(texts: Mapping[str, str]) -> str:
        return "  ".join(
            texts[name].rjust(widths[name]) if right[name] else texts[name].ljust(widths[name]) for name in names
        ).rstrip()

    head = line(titles)
    body = [line({name: cells[name][i] for name in names}) for i in range(len(rows))]
    return "\n".join([head, "  ".join("-" * widths[name] for name in names), *body]) + note


def table_cells(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str | Callable[[Mapping[str, Any]], Any]]
) -> list[dict[str, Any]]:
    """Return the cells of a table; ``columns`` maps each title to the name of a value or a function of the row."""
    return [
        {title: row[value] if isinstance(value, str) else value(row) for title, value in columns.items()}
        for row in rows
    ]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


class Progress:
    """Progress with rate and time left; a context manager.

    Args:
        total: None if it is unknown.
        every: Seconds between lines in a log; they come also while nothing is finished.
        brief: Work that ends before the first of these lines leaves none.
        stream: None uses standard error.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        *,
        every: float = 10.0,
        brief: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._title, self._total, self._unit, self._every = printable(title), total, unit, every
        self._bar: tqdm[None] | None = None
        # A stream of Jupyter is no terminal, but shows a bar as a widget.
        in_notebook = type(self._stream).__module__.startswith("ipykernel")
        if in_notebook or self._stream.isatty():
            self._bar = (widget_bar if in_notebook else tqdm)(
                total=total, desc=self._title, unit=f" {unit}", file=self._stream, dynamic_ncols=True, leave=not brief
            )
        self._brief = brief
        self._started = self._printed = time.monotonic()
        self._done = self._skipped = 0
        self._ended = threading.Event()

    def skip(self, count: int) -> None:
        """Count work of an earlier run, which does not enter the rate."""
        self._skipped += count
        if self._bar is not None:
            self._bar.initial += count
            self._bar.update(count)

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._printed >= self._every:
            self._print(self._line())

    def count(self, count: int, *, is_new: bool) -> None:
        """Count finished work; what is not new was finished by an earlier run."""
        (self.update if is_new else self.skip)(count)

    def __enter__(self) -> Self:
        if self._bar is None and self._every:
            threading.Thread(target=self._keep_printing, name="progress", daemon=True).start()
        return self

    def _keep_printing(self) -> None:
        while not self._ended.wait(self._every / 4):
            if time.monotonic() - self._printed >= self._every:
                self._print(self._line())

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()
        elif kind is None and not (self._brief and self._printed == self._started):
            seconds = time.monotonic() - self._started
            at = self._done + self._skipped
            counted = f"{at} {self._unit} in " if at or self._total is not None else ""
            self._print(f"{self._title}: {counted}{time_text(seconds)}")

    def _line(self) -> str:
        at = self._done + self._skipped
        if self._total is None and not at:
            return f"{self._title}: at work for {time_text(time.monotonic() - self._started)}"
        parts = [f"{self._title}: {at}{'' if self._total is None else f' of {self._total}'} {self._unit}"]
        if self._done:  # without finished work there is no rate, and no time left
            rate = self._done / max(1e-9, time.monotonic() - self._started)
            parts.append(f"{rate:.3g}/s")
            if self._total is not None:
                parts.append(f"{time_text(max(0, self._total - at) / rate)} left")
        return ", ".join(parts)

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(line, file=self._stream, flush=True)


@contextmanager
def shown_steps(title: str, total: int, unit: str) -> Iterator[Callable[[], object]]:
    """Show steps that take longer than some seconds, and yield the function to call after each."""
    with Progress(title, total, unit, brief=True) as progress:
        yield progress.update


def at_work(title: str) -> Progress:
    """Return a display of work whose steps cannot be counted."""
    return Progress(title, None, "", brief=True)


def time_text(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


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
