"""The time of a study in all its calls, kept in its folder: what is used, what is planned, and what had time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from headscan.runs.progress import time_text
from headscan.store.output_files import write_text

#: Seconds between two records of the time. A killed call loses at most so many.
_EVERY = 10.0
#: Share of the plan that weighs as much as the time that steps took.
_TRUSTED = 0.2


class StudyClock:
    """The clock of a study in a folder; a new one goes on from the record of earlier calls.

    Attributes:
        plan: Approximate seconds of each step, by its number and name.
        question_seconds: Approximate seconds of a benchmark question, and of one question of each recall task together,
            for one arm.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._started = folder / "time.json", time.monotonic()
        record = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        self._earlier: float = record.get("seconds", 0.0)
        self.plan: dict[str, float] = record.get("plan", {})
        self.question_seconds: tuple[float, float] = tuple(record.get("question_seconds", (0.0, 0.0)))
        self._begun: dict[str, float] = record.get("begun", {})
        self._granted: list[str] = record.get("granted", [])
        self._resumed = len(self._begun)

    @property
    def seconds(self) -> float:
        """Seconds that all calls have used."""
        return self._earlier + time.monotonic() - self._started

    def set_plan(self, seconds: Mapping[str, float], question_seconds: tuple[float, float]) -> None:
        """Plan the steps and the questions."""
        self.plan, self.question_seconds = dict(seconds), question_seconds
        self._save()

    def begin(self, title: str) -> str:
        """Begin the step of a title such as ``1. scan: ...``, and return the time that is used and left, in words."""
        number = title.partition(".")[0]
        position = list(self._begun).index(number) if number in self._begun else len(self._begun)
        was_ended = position < self._resumed - 1
        self._begun.setdefault(number, self.seconds)
        self._save()
        if was_ended:
            return "done by an earlier call"
        left = self._left(number)
        return f"{time_text(self.seconds)} so far{f', about {time_text(left)} left' if left else ''}"

    def asking_seconds(self, questions: int, recall: int, arms: int) -> float:
        """Return about how many seconds it takes to ask every arm so many benchmark questions, and of each recall task;
        arms that share work take less.
        """
        benchmark, of_recall = self.question_seconds
        current = list(self._begun)[-1:]
        return arms * (questions * benchmark + recall * of_recall) * (self._pace(current[0]) if current else 1.0)

    def has_time(self, step: str, seconds: float, expected: float = 0.0) -> bool:
        """Return True if a step of ``expected`` seconds ends before the study has used ``seconds``, or if the step had
        time in an earlier call: what is done stays part of the study.
        """
        if step not in self._granted:
            if self.seconds + expected > seconds:
                return False
            self._granted.append(step)
            self._save()
        return True

    def left(self, hours: float) -> list[str]:
        """Return lines for a call that resumes: which steps are done, and how long the others will take."""
        if not self._begun or not self.plan:
            return []
        current = list(self._begun)[-1]
        left = self._left(current)
        used = f"earlier calls used {time_text(self._earlier)} of {hours:g} h"
        lines = [f"{used}; about {time_text(left)} of the planned work is left" if left >= 1 else used]
        width = max(map(len, self.plan))
        for name, seconds in self.plan.items():
            number = name.partition(".")[0]
            state = time_text(seconds * self._pace(current))
            if number in self._begun:
                state = f"{state} in all, begun" if number == current else "done"
            elif int(number) < int(current):
                state = "left out"
            lines.append(f"  {name:<{width}}  {state}")
        return lines

    def _left(self, number: str) -> float:
        """Return the seconds of the work that is left when a step is the current one; 0 without a plan."""
        planned = {name.partition(".")[0]: seconds for name, seconds in self.plan.items()}
        pace = self._pace(number)
        done = self.seconds - self._begun[number]
        later = sum(seconds for each, seconds in planned.items() if int(each) > int(number))
        return pace * later + max(0.0, pace * planned.get(number, 0.0) - done)

    def _pace(self, number: str) -> float:
        """Return how many times as long as planned the steps before a step took, and 1 before any ended. A part of the
        plan counts as if it took its time, because short first steps also load the model.
        """
        planned = {name.partition(".")[0]: seconds for name, seconds in self.plan.items()}
        steps = list(self._begun)
        steps = steps[: steps.index(number)]
        expected = sum(planned.get(each, 0.0) for each in steps)
        if not expected:
            return 1.0
        trusted = _TRUSTED * sum(planned.values())
        return (self._begun[number] - self._begun[steps[0]] + trusted) / (expected + trusted)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the time of the block every few seconds, so that even a killed call counts."""
        ended = threading.Event()

        def keep_saving() -> None:
            while not ended.wait(_EVERY):
                with suppress(OSError):  # the store reports a full disk
                    self._save()

        thread = threading.Thread(target=keep_saving, name="study clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._save()

    def _save(self) -> None:
        record = {
            "seconds": self.seconds,
            "plan": self.plan,
            "question_seconds": self.question_seconds,
            "begun": self._begun,
            "granted": self._granted,
        }
        write_text(self._file, json.dumps(record, indent=1) + "\n")
