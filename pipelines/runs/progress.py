"""Progress of long work: a bar, or lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from headscan.pipelines.runs.text_tables import printable


class Progress:
    """Progress with rate and time left; a context manager.

    Args:
        title: Name of the work.
        total: Total count; None if it is unknown.
        unit: Name of the counted things.
        every: Seconds between lines in a log.
        stream: Output stream; None uses standard error.
    """

    def __init__(
        self, title: str, total: int | None, unit: str, *, every: float = 15.0, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._title, self._total, self._unit, self._every = printable(title), total, unit, every
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total, desc=self._title, unit=f" {unit}", file=self._stream, dynamic_ncols=True, leave=True
            )
        self._started = self._printed = time.monotonic()
        self._done = self._skipped = 0

    def skip(self, count: int) -> None:
        """Count work of an earlier run, which does not enter the rate."""
        self._skipped += count
        if self._bar is not None:
            self._bar.initial += count
            self._bar.update(count)

    def update(self, count: int = 1) -> None:
        """Count finished work."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._printed >= self._every:
            self._print(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            seconds = time.monotonic() - self._started
            self._print(f"{self._title}: {self._done + self._skipped} {self._unit} in {time_text(seconds)}")

    def _line(self) -> str:
        at = self._done + self._skipped
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


def time_text(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
