"""Progress in a log and on a terminal, which control characters of a store, a corpus or a model do not reach."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.cli.option_parser import with_flags
from headscan.cli.verb_base import step_verb
from headscan.runs.progress import Progress, time_text
from headscan.steps.plan import Plan
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.text_tables import printable, printable_lines, say
from tests.numbers.conftest import answer_table
from tests.stores import begin_arm

EVIL = "\x1b]0;owned\x07\x1b[31m\rname\x9b2J\u202egpj.exe\u2066\x00\x7f"
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with control characters in every text that a run and an arm hold."""
    store = Store(tmp_path_factory.mktemp("evil") / "evil.duckdb")
    run = RunRecord("evaluate", EVIL, EVIL, 1, 1, corpus=EVIL, code_version=EVIL, packages={EVIL: EVIL})
    run_id = store.begin_run(run).run_id
    arm = begin_arm(store, run_id, EVIL, "baseline")
    store.finish_arm(arm, answer_table([EVIL], [1.0]), ablated_share=0.0)
    return store.path


def test_unsafe_characters_become_their_escapes() -> None:
    assert printable("\x1b[31mred\x1b[0m") == r"\x1b[31mred\x1b[0m"
    assert printable("a\nb\tc\r\x7f\x85\u202e\u2028\ud800") == r"a\nb\tc\r\x7f\x85\u202e\u2028\ud800"
    assert printable("Häuser, 文, \U0001f600, क्‍ष") == "Häuser, 文, \U0001f600, क्‍ष"
    assert printable_lines("one\x07\ntwo\n") == "one\\x07\ntwo\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["sql", "from runs"],
        ["sql", "from arms"],
        ["sql", "from answers"],
        ["sql", f'select model as "{EVIL}" from runs'],
        ["sql", "select error(model) from runs"],
        ["sql", f"from '{EVIL}'"],
        ["rank", "--run", EVIL],
        ["rank", "--by", EVIL],
    ],
)
def test_a_stores_text_is_shown_as_escapes(
    evil: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code = main([*arguments, "--store", str(evil)])
    out, err = capsys.readouterr()
    assert code in (0, 2) and out + err
    assert not _OBEYED.search(out + err)
    if code == 2:
        assert err.startswith("headscan: ") and err.count("\n") == 1


@pytest.mark.parametrize("verb", ["csv", "json"])
def test_formats_for_programs_are_true_in_a_pipe_and_safe_on_a_terminal(
    evil: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    arguments = ["sql", "select model from runs", "--format", verb, "--store", str(evil)]
    assert main(arguments) == 0
    piped = capsysbinary.readouterr().out.decode()
    if verb == "csv":
        assert piped == f'"model"\n"{EVIL}"\n'
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(arguments) == 0
    assert "name" in terminal.getvalue() and not _OBEYED.search(terminal.getvalue())


def test_log_lines_and_progress_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{EVIL}: finished before")
    with Progress(EVIL, 2, "shard", every=0.0) as progress:
        progress.update()
    out, err = capsys.readouterr()
    assert out == "" and "finished before" in err and "2 shards" in err
    assert not _OBEYED.search(err)
    terminal = Terminal()
    with Progress("\x1b[31m\x07title", 2, "shard", stream=terminal) as progress:
        progress.update()
    assert r"\x1b[31m\x07title" in terminal.getvalue() and "\x07" not in terminal.getvalue()


def test_paths_that_look_like_options_stay_in_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = f"{tmp_path}/of store=1.duckdb"
    for words in (["plan", "--method", "random"], ["rank"], ["status"]):
        assert main([*words, "--store", path]) == 2
        assert f"there is no store at {path}. " in capsys.readouterr().err
    Path(path).touch()
    assert main(["status", "--store", path]) == 2
    assert f"{path} is empty (0 bytes). " in capsys.readouterr().err


def test_messages_of_the_library_name_the_flags_of_the_command_line() -> None:
    verb = step_verb(Plan)
    limited = "`max_tokens=5` (limit 4). Lower `max_tokens`"
    assert with_flags(limited, verb) == "--max-tokens 5 (limit 4). Lower --max-tokens"
    assert with_flags("set `search=False` or `search=True`", verb) == "set --no-search or --search"
    assert with_flags("`offload=cpu` keeps layers in RAM", verb) == "--offload cpu keeps layers in RAM"
    assert with_flags("`memory=700 B` (limit 500 B)", verb) == "--memory 700 B (limit 500 B)"
    assert with_flags("`safetensors=False`", verb) == "--pickled-weights"
    assert with_flags("`source=x`", verb) == "MODEL x"
    untouched = "`folder=x`, `wait=3`, memory, /data/memory=1, memory=1.json and `ray start`"
    assert with_flags(untouched, verb) == untouched


def test_progress_has_a_rate_of_new_work_and_the_time_left() -> None:
    out = io.StringIO()
    with Progress("scan", 10, "shard", every=0.0, stream=out) as progress:
        progress.skip(4)
        progress.update(0)
        progress.update(2)
    first, second, last = out.getvalue().splitlines()
    assert first == "scan: 4 of 10 shards, 0.0 s so far"
    assert second.startswith("scan: 6 of 10 shards, ") and "/s, " in second and second.endswith(" left")
    assert last == "scan: 6 shards, done in 0.0 s"
    out = io.StringIO()
    with Progress("scan", 1, "shard", every=0.0, stream=out) as progress:
        progress.update(3)
    assert "scan: 3 of 1 shard, " in out.getvalue() and "/s, finishing\n" in out.getvalue()
    out = io.StringIO()
    with Progress("damage", 100, "prompt", every=0.0, stream=out) as progress:
        progress.count(90, is_new=False)
        progress.count(0, is_new=True)
    assert out.getvalue().splitlines()[0] == "damage: 90 of 100 prompts, 0.0 s so far"


def test_the_time_left_follows_the_latest_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first item took 60 s, the others 1 s each; and what is left is never 0 s."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("headscan.runs.progress.time.monotonic", lambda: now[0])
    progress = Progress("answers", 190, "request", every=1e-9, stream=out)
    for seconds in (60.0, *[1.0] * 189):
        now[0] += seconds
        progress.update()
    now[0] += 300
    progress.update(0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "answers: 1 of 190 requests, 0.0167/s, 3 h 09 min left"
    assert lines[59] == "answers: 60 of 190 requests, 0.504/s, 4 min left"
    assert lines[60] == "answers: 61 of 190 requests, 1/s, 2 min left"
    assert lines[188].endswith("189 of 190 requests, 1/s, 1.0 s left")
    assert [line for line in lines if " 0.0 s left" in line] == []
    assert lines[189].endswith(", finishing") and lines[190].endswith(", finishing")


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


def test_lines_of_long_work_and_of_short_work() -> None:
    out = io.StringIO()
    with Progress("importance", 8, "sequence", every=0.02, stream=out):
        for _ in range(500):
            if out.getvalue():
                break
            time.sleep(0.01)
        assert out.getvalue().splitlines()[0] == "importance: 0 of 8 sequences, 0.0 s so far"
    out = io.StringIO()
    with Progress("moments", 3, "batch", brief=True, stream=out) as progress:
        progress.update(3)
    assert out.getvalue() == ""
    with Progress("report", None, "", every=0.02, brief=True, stream=out):
        for _ in range(500):
            if out.getvalue():
                break
            time.sleep(0.01)
    first, *_, last = out.getvalue().splitlines()
    assert re.fullmatch(r"report: \d+\.\d s so far", first) and re.fullmatch(r"report: done in \d+\.\d s", last)


def test_a_notebook_shows_a_bar() -> None:
    """A stream of Jupyter is no terminal; a bar goes there, and none to a log."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with Progress("scan", 4, "shard", stream=stream) as progress:
        assert progress._bar is not None
        progress.update(4)
    with Progress("scan", 4, "shard", stream=io.StringIO()) as progress:
        assert progress._bar is None
