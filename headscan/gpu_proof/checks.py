"""Checks of measured numbers against reference numbers, with bounds and outcomes."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscan.models.token_batches import release_memory

Verdict = Literal["right", "WRONG", "FAILED", "not run"]

#: Numbers that are all smaller are compared by absolute error, since they may be zero by definition.
_SMALLEST = 1e-2


@dataclass(frozen=True)
class Difference:
    """One comparison of measured numbers with reference numbers.

    Attributes:
        what: Description of the numbers.
        error: Largest or mean error; NaN if only one of both numbers is finite.
        bound: Largest allowed error.
    """

    what: str
    error: float
    bound: float

    @property
    def wrong(self) -> bool:
        """True if the error exceeds the bound or is not a number."""
        return not self.error <= self.bound

    @property
    def severity(self) -> float:
        """The error in units of the bound."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.bound if self.bound else float("inf") if self.error else 0.0


@dataclass(frozen=True)
class Comparer:
    """A comparison of measured numbers with reference numbers.

    Attributes:
        fault: Relative error added to every measured number, to test that the proof detects it.
    """

    fault: float = 0.0

    def close(
        self,
        what: str,
        found: Tensor,
        expected: Tensor,
        bound: float,
        *,
        mean: bool = False,
        smallest: float = _SMALLEST,
    ) -> Difference:
        """Compare numbers of one kind; NaN must match NaN.

        The error is that of the worst number (or the mean error), in units of the largest reference number, or of
        ``smallest`` where that is larger.
        """
        wide, reference = found.detach().cpu().double() * (1.0 + self.fault), expected.detach().cpu().double()
        if wide.shape != reference.shape or not torch.equal(wide.isfinite(), reference.isfinite()):
            return Difference(what, float("nan"), bound)
        known = reference.isfinite()
        if not known.any():
            return Difference(what, 0.0, bound)
        error = (wide - reference)[known].abs()
        scale = max(float(reference[known].abs().max()), smallest)
        return Difference(what, float(error.mean() if mean else error.max()) / scale, bound)

    def same(self, what: str, found: Tensor, expected: Tensor, *, share: float = 0.0) -> Difference:
        """Compare integers or booleans.

        The error is the share that differs, and ``share`` is its bound.
        """
        if found.shape != expected.shape:
            return Difference(what, float("nan"), share)
        # A fault shifts measured values away from every valid one.
        differs = found.detach().cpu().double() + self.fault != expected.detach().cpu().double()
        return Difference(what, float(differs.double().mean()) if differs.numel() else 0.0, share)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        group: Name of its group in ``--only``.
        name: Description of the check.
        run: Yields the comparisons.
    """

    group: str
    name: str
    run: Callable[[Comparer], Iterator[Difference]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        check: The check.
        verdict: ``right``; ``WRONG``: a number; ``FAILED``: an exception ended it; ``not run``: no time was left.
        compared: Number of comparisons.
        worst: The comparison with the largest error in units of its bound.
        complaints: Wrong comparisons and failures, one line each.
        seconds: Duration.
    """

    check: Check
    verdict: Verdict
    compared: int = 0
    worst: Difference | None = None
    complaints: tuple[str, ...] = ()
    seconds: float = 0.0


def run_check(check: Check, compare: Comparer) -> Outcome:
    """Run a check; an exception becomes its outcome."""
    started = time.perf_counter()
    differences: list[Difference] = []
    failure: str | None = None
    try:
        for difference in check.run(compare):
            differences.append(difference)
    except Exception as problem:
        failure = f"{type(problem).__name__}: {first_line(problem)}"
        print(f"\n{check.group}, {check.name}:", file=sys.stderr)
        traceback.print_exc()
    if failure is not None:
        clean_up()
    complaints = [f"{d.what}: {d.error:.1e}" for d in differences if d.wrong]
    if failure is None and not differences:
        failure = "it compared nothing"
    if failure is not None:
        complaints.append(failure)
    verdict: Verdict = "FAILED" if failure is not None else "WRONG" if complaints else "right"
    worst = max(differences, key=lambda difference: difference.severity, default=None)
    return Outcome(check, verdict, len(differences), worst, tuple(complaints), time.perf_counter() - started)


def clean_up() -> None:
    """Free the memory of a failed check, if CUDA still works."""
    with suppress(RuntimeError):
        release_memory()


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(problem).strip().splitlines() or ["without a message"])[0]
