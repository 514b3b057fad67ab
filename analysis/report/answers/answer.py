"""One answer at the top of a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: ``known``: a verdict. ``open``: measured, but not shown either way. ``missing``: nothing was measured.
State = Literal["known", "open", "missing"]


@dataclass(frozen=True)
class Answer:
    """One question with its answer.

    Attributes:
        headline: The number in a few words.
        detail: The number with its interval and conditions.
        link: Identity of the section with the evidence; None without one.
        command: Command that gives a missing or better answer; None if none is needed.
    """

    question: str
    headline: str
    detail: str
    state: State
    link: str | None = None
    command: str | None = None


#: What commands call a bundled model, by its name in the store.
_BUNDLED = {"demo-5m": "demo"}


@dataclass(frozen=True)
class Commands:
    """Commands on the model and store of a report."""

    model: str
    store: Path

    @classmethod
    def of(cls, run: Mapping[str, Any], store: Path) -> Commands:
        """Return the commands for a run's model."""
        return cls(_BUNDLED.get(run["model"], run["model"]), store)

    @property
    def texts_and_tasks(self) -> tuple[str, ...]:
        """The options of `prune` that name texts and tasks; the bundled model has its own."""
        return () if self.model in _BUNDLED.values() else ("--corpus", "CORPUS", "--tasks", "TASKS")

    def on_model(self, verb: str, *options: str) -> str:
        """Return a command that names the model."""
        return shlex.join(["headscan", verb, self.model]) + self._rest(options)

    def on_store(self, verb: str, *options: str) -> str:
        """Return a command that names the store only."""
        return f"headscan {verb}" + self._rest(options)

    def _rest(self, options: tuple[str, ...]) -> str:
        return " ".join(["", *options, "--store", shlex.quote(str(self.store))])


def interval(value: float, low: float, high: float) -> str:
    """Return a difference in points with its 95 % interval."""
    return f"{value:+.2f} points [{low:+.2f}, {high:+.2f}]"
