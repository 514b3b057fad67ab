"""Progress in a log: plain lines with rate and time left."""

from __future__ import annotations

import io
import time

import pytest

from headscan.runs.progress import Progress, time_text


def test_nothing_is_foretold_before_something_is_done() -> None:
    out = io.StringIO()
    with Progress("scan", 10, "shards", every=0.0, stream=out) as progress:
        progress.skip(4)
        progress.update(0)
        progress.update(2)
    first, second, last = out.getvalue().splitlines()
    assert first == "scan: 4 of 10 shards"
    assert second.startswith("scan: 6 of 10 shards, ") and "/s, " in second and second.endswith(" left")
    assert last.startswith("scan: 6 shards in ")


def test_more_than_the_total_leaves_no_time() -> None:
    out = io.StringIO()
    with Progress("scan", 1, "shards", every=0.0, stream=out) as progress:
        progress.update(3)
    assert ", 0.0 s left" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (59.4, "59 s"),
        (61, "1 min"),
        (3540, "59 min"),
        (3599, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_line_comes_while_nothing_is_finished() -> None:
    out = io.StringIO()
    with Progress("importance", 8, "sequences", every=0.02, stream=out):
        for _ in range(500):
            if out.getvalue():
                break
            time.sleep(0.01)
        assert out.getvalue().splitlines()[0] == "importance: 0 of 8 sequences"


def test_short_brief_work_prints_nothing_and_long_work_its_time() -> None:
    out = io.StringIO()
    with Progress("moments", 3, "batches", brief=True, stream=out) as progress:
        progress.update(3)
    assert out.getvalue() == ""
    with Progress("report", None, "", every=0.02, brief=True, stream=out):
        for _ in range(500):
            if out.getvalue():
                break
            time.sleep(0.01)
    first, *_, last = out.getvalue().splitlines()
    assert first == "report: at work for 0.0 s" and last.startswith("report: ") and "at work" not in last


def test_known_work_does_not_enter_the_rate() -> None:
    out = io.StringIO()
    with Progress("damage", 100, "prompts", every=0.0, stream=out) as progress:
        progress.count(90, is_new=False)
        progress.count(0, is_new=True)
    assert out.getvalue().splitlines()[0] == "damage: 90 of 100 prompts"


def test_a_notebook_shows_a_bar() -> None:
    """A stream of Jupyter is no terminal; a bar goes there, and none to a log."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with Progress("scan", 4, "shards", stream=stream) as progress:
        assert progress._bar is not None
        progress.update(4)
    with Progress("scan", 4, "shards", stream=io.StringIO()) as progress:
        assert progress._bar is None
