"""A measured plan that was stopped resumes: the same plan, and nothing is measured twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.cluster.pool import InProcessPool
from headscan.errors import ResumeError
from headscan.plans import HeadPlan, WindowHeads, WindowShare
from headscan.runs import code_version
from headscan.runs.run_context import ModelContext, Run
from headscan.steps.run_plan import run_plan
from headscan.store.store import Store
from tests.jobs.conftest import THREADS
from tests.jobs.steps.test_measured_plan import SMALL as MEASURED
from tests.jobs.steps.test_measured_plan import SPEC
from tests.stores import copy_store

#: Resuming does not depend on how much is measured.
SMALL = replace(MEASURED, sequences=2)

#: Tasks whose items are kept.
MEASURING = ("measure_damages", "measure_needs", "AnswerTask")


class Stopped(Exception):
    pass


class CountingPool(InProcessPool):
    """Notes every measured item, and stops before number ``most``."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__(SPEC, THREADS)
        self.most, self.measured = most, list[Any]()

    def map(self, task, items):  # type: ignore[no-untyped-def]
        name = getattr(task, "__name__", type(task).__name__)
        if name not in MEASURING:
            yield from super().map(task, items)
            return
        for item in items:
            if len(self.measured) == self.most:
                raise Stopped
            for done in super().map(task, [item]):
                self.measured.append((name, vars(item)))
                yield done


def made(store: Path | None, most: int | None = None, count: int = 2, **options: Any) -> tuple[HeadPlan, list[Any]]:
    """Return a plan, of which few exchanges are tried, and what was measured."""
    with CountingPool(most) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscan.plans.window_search._ROUNDS", 1)
        patch.setattr("headscan.plans.window_search._TRIES", 2)
        context = ModelContext(SPEC, lambda _: pool, batch_tokens=2048)
        if store is not None:
            context = Run(SPEC, Store(store), lambda _: pool, batch_tokens=2048, **options)
        return run_plan(SMALL, context, WindowHeads(count)), pool.measured


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `undisturbed`."""
    return tmp_path_factory.mktemp("finished") / "s.duckdb"


@pytest.fixture(scope="module")
def undisturbed(finished: Path) -> tuple[str, list[Any]]:
    plan, measured = made(finished)
    assert {name for name, _ in measured} == set(MEASURING)
    return plan.to_json(), measured


@pytest.mark.parametrize("share", [0.1, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_stopped_plan_resumes_with_the_same_numbers(
    undisturbed: tuple[str, list[Any]], tmp_path: Path, share: float
) -> None:
    expected, measured = undisturbed
    store, first = tmp_path / "s.duckdb", int(share * len(measured))
    with pytest.raises(Stopped):
        made(store, first)
    assert [run["status"] for run in Store(store).runs("plan")] == ["failed"]
    plan, rest = made(store)
    assert plan.to_json() == expected
    assert len(rest) == len(measured) - first
    assert [run["status"] for run in Store(store).runs("plan")] == ["finished"]


def test_a_finished_plan_is_not_measured_again_and_other_budgets_share_its_damages(
    undisturbed: tuple[str, list[Any]], finished: Path, tmp_path: Path
) -> None:
    store = copy_store(finished, tmp_path / "s.duckdb")
    again, measured = made(store)
    assert (again.to_json(), measured) == (undisturbed[0], [])
    other, measured = made(store, count=1)
    alone, _ = made(None, count=1)
    assert other.to_json() == alone.to_json()
    assert {name for name, _ in measured} == {"AnswerTask"}
    (run,) = Store(store).runs("plan")
    assert run["status"] == "finished"


KILLED = """
import os, signal, sys
from headscan.store.store import Store
from headscan.runs import ledger
from tests.jobs.steps.test_plan_resume import made

ledger.WRITE_SECONDS = 0.0
add = ledger.Ledger.add
left = int(sys.argv[2])

def added(self, unit, numbers):
    global left
    add(self, unit, numbers)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

ledger.Ledger.add = added
made(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_plan_resumes(undisturbed: tuple[str, list[Any]], tmp_path: Path) -> None:
    expected, measured = undisturbed
    store, first = tmp_path / "s.duckdb", len(measured) // 2
    ended = subprocess.run([sys.executable, "-c", KILLED, str(store), str(first)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = Store(store).runs("plan")
    assert left["status"] == "interrupted"
    assert Store(store).query("FROM units").num_rows == first
    plan, rest = made(store)
    assert (plan.to_json(), len(rest)) == (expected, len(measured) - first)


@pytest.mark.slow
def test_other_software(undisturbed: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished plan of other software is refused, a finished one is measured again."""
    _, measured = undisturbed
    store = tmp_path / "s.duckdb"
    with pytest.raises(Stopped):
        made(store, 3)
    monkeypatch.setattr(code_version, "package_versions", lambda: {"torch": "0.1"})
    with pytest.raises(ResumeError, match="torch"):
        made(store)
    _, rest = made(store, resume_anyway=True)
    assert len(rest) == len(measured) - 3
    monkeypatch.setattr(code_version, "package_versions", lambda: {"torch": "0.2"})
    lines: list[str] = []
    _, all_again = made(store, say=lines.append)
    assert len(all_again) == len(measured)
    assert any("measured again with" in line for line in lines)
    (run,) = Store(store).runs("plan")
    assert [each["packages"] for each in run["provenance"]] == [{"torch": "0.2"}]


def test_a_plan_without_a_store_reports_that_it_keeps_nothing() -> None:
    lines: list[str] = []
    with CountingPool(0) as pool, pytest.raises(Stopped):
        run_plan(SMALL, ModelContext(SPEC, lambda _: pool, say=lines.append), WindowShare(0.5))
    assert lines[0] == "without a store, a job that stops keeps nothing of what it measured"
