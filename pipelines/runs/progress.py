"""Progress of long work: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from headscan.pipelines.runs.terminal import printable


class Progress:
    """Counts what is done, with rate and time left. Use it as a context manager.

    Args:
        title: What is being done.
        total: How much there is, or None when nobody knows yet.
        unit: What is counted.
        every: Seconds between lines in a log.
        stream: Where to; None: standard error.
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
        self._started = self._said = time.monotonic()
        self._done = self._skipped = 0

    def skip(self, count: int) -> None:
        """Count what an earlier run has done; it does not enter the rate."""
        self._skipped += count
        if self._bar is not None:
            self._bar.initial += count
            self._bar.update(count)

    def update(self, count: int = 1) -> None:
        """Count what has just been done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._said >= self._every:
            self._say(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            seconds = time.monotonic() - self._started
            self._say(f"{self._title}: {self._done + self._skipped} {self._unit} in {seconds:.1f} s")

    def _line(self) -> str:
        rate = self._done / max(1e-9, time.monotonic() - self._started)
        at = self._done + self._skipped
        if self._total is None:
            return f"{self._title}: {at} {self._unit}, {rate:.3g}/s"
        left = (self._total - at) / rate if rate else float("inf")
        return f"{self._title}: {at} of {self._total} {self._unit}, {rate:.3g}/s, {left:.0f} s left"

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        print(line, file=self._stream, flush=True)
