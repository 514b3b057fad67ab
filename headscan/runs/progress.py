"""Progress of work in a terminal, a notebook or a log."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TextIO

from tqdm import tqdm
from tqdm.auto import tqdm as widget_bar

from headscan.text_tables import counted, plural, printable


class Progress:
    """Progress with rate and time left, from the speed of the later half of the time so far; a context manager.

    Every line in a log has the form ``title: amount, rate, time``, without the parts that are unknown, such as
    ``scan: 8 of 16 sequences, 0.76/s, 11 s left``, ``report: 10 s so far`` and ``scan: 16 sequences, done in 21 s``.

    Args:
        total: None if it is unknown.
        unit: Noun in the singular.
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
                total=total,
                desc=self._title,
                unit=f" {plural(unit)}",
                file=self._stream,
                dynamic_ncols=True,
                leave=not brief,
            )
        self._brief = brief
        self._started = self._printed = time.monotonic()
        self._done = self._skipped = 0
        # Times at which work was finished, with its amount; the first one is as old as half of the time or older.
        self._finished = deque([(self._started, 0)])
        self._ended = threading.Event()

    def skip(self, count: int) -> None:
        """Count work of an earlier run, which does not enter the rate."""
        self._skipped += count
        if self._bar is not None:
            self._bar.initial += count
            self._bar.update(count)

    def update(self, count: int = 1) -> None:
        self._done += count
        self._finished.append((time.monotonic(), self._done))
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._printed >= self._every:
            self._print(self._line(self._state()))

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
                self._print(self._line(self._state()))

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()
        elif kind is None and not (self._brief and self._printed == self._started):
            at = self._done + self._skipped
            amount = [counted(at, self._unit)] if at or self._total is not None else []
            self._print(self._line([*amount, f"done in {self._time()}"]))

    def _line(self, parts: Sequence[str]) -> str:
        return f"{self._title}: {', '.join(parts)}"

    def _time(self) -> str:
        return time_text(time.monotonic() - self._started)

    def _state(self) -> list[str]:
        """Return amount, rate and time of unfinished work; without finished work there is no rate, and no time left."""
        at, total = self._done + self._skipped, self._total
        rate = self._rate() if self._done else None
        parts = [] if rate is None else [f"{rate:.3g}/s"]
        if total is not None:
            parts.insert(0, f"{at:,} of {counted(total, self._unit)}")
            if at >= total:
                return [*parts, "finishing"]
        elif at:
            parts.insert(0, counted(at, self._unit))
        if rate is None or total is None:
            return [*parts, f"{self._time()} so far"]
        return [*parts, f"{time_text(max(1.0, (total - at) / rate))} left"]

    def _rate(self) -> float:
        """Return the work that was finished per second. The first items are often slow, so the later half of the time
        counts; a half in which nothing was finished says nothing.
        """
        now = time.monotonic()
        middle = (self._started + now) / 2
        while len(self._finished) > 1 and self._finished[1][0] <= middle:
            self._finished.popleft()
        since, done = self._finished[0]
        if done == self._done:
            since, done = self._started, 0
        return (self._done - done) / max(1e-9, now - since)

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
