"""The time of a study in all its calls, and a folder that belongs to one of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.steps.prune.work_folder import claimed
from headscan.study.study_clock import StudyClock
from headscan.study.study_step import StudyError

PLAN = {"1. scan": 60.0, "2. probe": 30.0, "4. plans": 300.0, "7. questions": 600.0}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the machine, which a test sets."""
    at = [1000.0]
    monkeypatch.setattr("headscan.study.study_clock.time.monotonic", lambda: at[0])
    return at


def test_the_hours_of_earlier_calls_count_and_time_between_calls_does_not(tmp_path: Path, now: list[float]) -> None:
    first = StudyClock(tmp_path)
    first.set_plan(PLAN, (0.0, 0.0))
    now[0] += 90
    assert first.has_time("the plans", 100)
    now[0] += 30
    first.begin("1. scan: all heads")
    now[0] += 86_400
    second = StudyClock(tmp_path)
    assert second.seconds == 120
    now[0] += 5
    assert second.seconds == 125 and not second.has_time("larger shares", 100) and second.has_time("it", 126)


def test_what_had_time_once_stays_part_of_the_study(tmp_path: Path, now: list[float]) -> None:
    """Or the same command would end with fewer savings than before."""
    first = StudyClock(tmp_path)
    assert first.has_time("the plans", 100) and first.has_time("look 2 of an arm", 100)
    now[0] += 200
    assert not first.has_time("look 3 of an arm", 100)
    first.begin("7. questions")
    second = StudyClock(tmp_path)
    assert second.has_time("the plans", 100) and second.has_time("look 2 of an arm", 100)
    assert not second.has_time("look 3 of an arm", 100)
    assert not second.has_time("the pruned models", 100)
    assert second.has_time("the pruned models", 1000)


def test_work_that_would_end_after_the_hours_is_not_begun(tmp_path: Path, now: list[float]) -> None:
    first = StudyClock(tmp_path)
    first.set_plan(PLAN, (0.5, 2.0))
    assert first.asking_seconds(100, 20, arms=2) == 180
    assert first.has_time("look 2", 180, expected=180)
    now[0] += 1
    assert not first.has_time("look 3", 180, expected=180)
    first.begin("1. scan: every head")
    now[0] += 120
    first.begin("4. plans: windows")
    second = StudyClock(tmp_path)
    # The scan took twice as long as planned: 120 and 198 of 60 and 198 seconds.
    assert second.asking_seconds(100, 20, arms=2) == pytest.approx(180 * 318 / 258)
    assert second.has_time("look 2", 180, expected=180)


def test_the_time_left_follows_the_measured_speed(tmp_path: Path, now: list[float]) -> None:
    """The first two steps take twice as long as planned, so the others are expected to take longer, too."""
    clock = StudyClock(tmp_path)
    clock.set_plan(PLAN, (0.0, 0.0))
    assert clock.begin("1. scan: every head") == "0.0 s so far, about 16 min left"  # as planned: 990 s
    now[0] += 120
    assert clock.begin("2. probe: heads") == "2 min so far, about 19 min left"  # 1.23 times as long as planned
    now[0] += 60
    assert clock.begin("4. plans: windows") == "3 min so far, about 20 min left"
    now[0] += 200
    assert StudyClock(tmp_path).seconds == 180  # as recorded when the step began
    assert clock.begin("7. questions") == "6 min so far, about 10 min left"  # 380 of 390 planned seconds


def test_a_resumed_study_names_what_is_done_and_what_is_left(tmp_path: Path, now: list[float]) -> None:
    assert StudyClock(tmp_path).left(2) == []
    first = StudyClock(tmp_path)
    first.set_plan(PLAN, (0.0, 0.0))
    first.begin("1. scan: every head")
    now[0] += 30
    first.begin("4. plans: windows")
    now[0] += 10
    with first.running():
        pass
    assert StudyClock(tmp_path).left(2) == [
        "earlier calls used 40 s of 2 h; about 13 min of the planned work is left",  # at 0.88 of the planned times
        "  1. scan       done",
        "  2. probe      left out",
        "  4. plans      4 min in all, begun",
        "  7. questions  9 min",
    ]
    second = StudyClock(tmp_path)
    assert second.begin("1. scan: every head") == "done by an earlier call"
    assert second.begin("4. plans: windows") == "40 s so far, about 13 min left"


def test_a_killed_call_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.study.study_clock._EVERY", 0.01)
    clock, file = StudyClock(tmp_path), tmp_path / "time.json"
    with clock.running():
        end = time.monotonic() + 10
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert json.loads(file.read_text())["seconds"] > 0


def test_a_second_study_in_a_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with claimed(out, out, StudyError):
        assert main(["study", "demo", "--out", str(out)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == (
        f"headscan: {out} is being built by another process (limit 1). Wait for it, or choose another folder"
    )
    assert not (out / "study.duckdb").exists()
