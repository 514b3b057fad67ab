"""``make gpu``: check every number on a GPU, and measure the overhead there.

    python -m headscan.gpu_proof
    python -m headscan.gpu_proof --only kernels,speed --minutes 3
    python -m headscan.gpu_proof --device cpu

Groups: `kernels` (fused attention and the identities against float64), `arms` (masks, rules, prefixes, shared rows and
layer ranges against the CPU), `families` (every architecture, small, against float64), `cache` (caches with windows
against masks, their bytes and speed), `answers` (arms with shared prefixes against full passes, and their speed),
`speed` (the cost of a scan, in total and by part).

Exit code: 0 if all numbers are right, or there is no GPU; 1 if a number is wrong or a check failed; 3 if the time ran
out and all numbers so far are right.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers.utils import logging

from headscan.errors import HeadscanError, InterventionError
from headscan.gpu_proof import answer_speed as answering
from headscan.gpu_proof import arm_checks, cache_checks, cache_speed, family_checks, kernel_checks, scan_speed
from headscan.gpu_proof.answer_speed import Answering, answer_checks
from headscan.gpu_proof.checks import Check, Comparer, Outcome, Verdict, clean_up, first_line, run_check
from headscan.gpu_proof.machine import describe
from headscan.gpu_proof.table import CHECK_COLUMNS, Table, cells_of, show

SPEED = "speed"
#: Groups in order of their run, with their shares of the time; later groups may use the time that is left.
_PARTS = {
    kernel_checks.GROUP: 4,
    arm_checks.GROUP: 3,
    family_checks.GROUP: 6,
    cache_checks.GROUP: 2,
    answering.GROUP: 3,
    SPEED: 4,
}
_OK, _WRONG, _INCOMPLETE = 0, 1, 3
#: Seconds after the time limit at which a hanging check is killed.
_GRACE = 45
#: File descriptor of standard error, which exists even if `sys.stderr` is not a file.
_STDERR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proof and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        groups = _groups(options.only)
    except HeadscanError as problem:
        print(f"headscan.gpu_proof: {problem}", file=sys.stderr)
        return problem.exit_code
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        show("No CUDA device here: nothing was run (--device cpu runs the same checks, small, on the CPU).")
        return _OK
    limit = 60 * options.minutes
    faulthandler.dump_traceback_later(limit + _GRACE, exit=True, file=_STDERR)
    try:
        with torch.no_grad(), _exact(), _quiet():
            return _Proof(device, groups, limit, options.small, options.fault).run()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headscan.gpu_proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu, with small shapes (default: cuda)")
    parser.add_argument("--small", action="store_true", help="small shapes on a GPU, too")
    parser.add_argument("--only", help=f"groups to run, separated by commas: {', '.join(_PARTS)} (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit in minutes (default: 8)")
    parser.add_argument(
        "--fault",
        type=float,
        default=0.0,
        help="relative error added to every measured number, to test that the proof finds it (default: 0)",
    )
    return parser


def _groups(only: str | None) -> tuple[str, ...]:
    """Return the chosen groups in order of their run.

    Raises:
        InterventionError: An unknown group.
    """
    chosen = set(_PARTS) if only is None else {name.strip() for name in only.split(",")}
    if unknown := sorted(chosen - set(_PARTS)):
        raise InterventionError(f"unknown group in --only: {unknown[0]!r}. Choose from {', '.join(_PARTS)}")
    return tuple(name for name in _PARTS if name in chosen)


@contextmanager
def _exact() -> Iterator[None]:
    """Disable TF32, to which a GPU rounds float32 convolutions by default."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable transformers' messages and progress bars, which would interrupt the tables."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


class _Proof:
    """One run of the proof."""

    def __init__(self, device: torch.device, groups: Sequence[str], limit: float, small: bool, fault: float) -> None:
        self._device, self._groups, self._limit = device, groups, limit
        self._small = small or device.type == "cpu"
        self._compare = Comparer(fault)
        self._began = time.perf_counter()
        self._answering = Answering(answering.SMALL if self._small else answering.LARGE, device)
        self._verdicts: Counter[Verdict] = Counter()

    def run(self) -> int:
        show(f"# GPU proof\n\n{describe(self._device)}")
        numbers = Table("## Numbers", CHECK_COLUMNS)
        for check in self._checks():
            outcome = Outcome(check, "not run") if self._late(check.group) else run_check(check, self._compare)
            self._verdicts[outcome.verdict] += 1
            numbers.row(*cells_of(outcome))
        if cache_checks.GROUP in self._groups:
            self._time_caches()
        if answering.GROUP in self._groups:
            self._time(Table("## Arms that answer", answering.COLUMNS), "arms", self._answering.rows)
            self._answering.drop_model()  # its weights would count in the scans' peaks
        if SPEED in self._groups:
            self._time_scans()
        return self._conclude()

    def _checks(self) -> Iterator[Check]:
        if kernel_checks.GROUP in self._groups:
            yield from kernel_checks.kernel_checks(self._device, small=self._small)
        if arm_checks.GROUP in self._groups:
            yield from arm_checks.arm_checks(self._device, small=self._small)
        if family_checks.GROUP in self._groups:
            few = family_checks.FEW if self._small else None
            yield from family_checks.family_checks(self._device, families=few)
        if cache_checks.GROUP in self._groups:
            yield from cache_checks.cache_checks(self._device, small=self._small)
        if answering.GROUP in self._groups:
            yield from answer_checks(self._answering)

    def _time_caches(self) -> None:
        ratios: dict[str, tuple[float, float, float]] = {}
        table = Table("## A decoding step with half of the KV heads windowed", cache_speed.COLUMNS)
        for load in cache_speed.CacheLoad.of(self._device, small=self._small):
            self._time(table, f"{load}", partial(cache_speed.cache_rows, load, self._device, ratios))
        show(f"\n{cache_speed.verdict_on_cache(ratios, self._device)}")

    def _time_scans(self) -> None:
        ratios: dict[str, float] = {}
        calls = Table("## One attention call", scan_speed.CALL_COLUMNS)
        for setting in scan_speed.settings(small=self._small):
            self._time(calls, f"{setting}", partial(scan_speed.call_rows, setting, self._device))
        scans = Table("## A scan beside the plain pass", scan_speed.SCAN_COLUMNS)
        for setting in scan_speed.settings(small=self._small):
            self._time(scans, f"{setting}", partial(scan_speed.scan_rows, setting, self._device, ratios))
        show(f"\n{scan_speed.verdict_on_goal(ratios)}")

    def _time(self, table: Table, name: str, rows: Callable[[], Iterator[tuple[object, ...]]]) -> None:
        """Print rows as they are measured.

        An exception becomes a row, and the run continues.
        """
        if self._late(self._groups[-1]):
            self._verdicts["not run"] += 1
            table.row(name, "not run: no time left")
            return
        try:
            for cells in rows():
                table.row(*cells)
        except Exception as problem:
            self._verdicts["FAILED"] += 1
            table.row(name, f"FAILED: {type(problem).__name__}: {first_line(problem)}")
            traceback.print_exc()
        clean_up()

    def _late(self, group: str) -> bool:
        """Return True if no further check of a group may start."""
        before = self._groups[: self._groups.index(group) + 1]
        share = sum(_PARTS[name] for name in before) / sum(_PARTS[name] for name in self._groups)
        return time.perf_counter() - self._began >= self._limit * share

    def _conclude(self) -> int:
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self._verdicts.items()) or "no checks"
        show(f"\nChecks: {counted}. {time.perf_counter() - self._began:.0f} s.")
        if self._verdicts["WRONG"] or self._verdicts["FAILED"]:
            return _WRONG
        return _INCOMPLETE if self._verdicts["not run"] else _OK


if __name__ == "__main__":
    raise SystemExit(main())
