"""Small things that a new user meets: origins, names, progress, interruption."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headscan.checkpoints.source_folder import DEMO_FOLDER
from headscan.cli.main import main, read_command
from headscan.cli.option_parser import UsageError
from headscan.plans import load_plan
from headscan.store.records import RunKind, RunRecord
from headscan.store.store import Store
from tests.numbers.plan_fixtures import RECENT, SINK, everything, site, write_scan
from tests.stores import begin_arm

LAYERS, HEADS, TOKENS = 4, 4, [64, 200]


@pytest.fixture
def scan(tmp_path: Path) -> tuple[Store, str]:
    grid = [site(i, HEADS, HEADS) | {"max_tokens": 512} for i in range(LAYERS)]
    return write_scan(tmp_path / "s.duckdb", grid, everything(LAYERS, HEADS, TOKENS), TOKENS)


def test_reading_verbs_name_their_scan(
    scan: tuple[Store, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run_id = scan
    window = ["--sink", str(SINK), "--recent", str(RECENT), "--out", str(tmp_path / "p.json")]
    for verb in (["rank", "--by", "entropy"], ["plan", "--method", "distant_mass", *window]):
        assert main([*verb, "--store", str(store.path)]) == 0
        assert f"from scan {run_id} of " in capsys.readouterr().err, verb
    # No line about lengths that the model cannot read.
    assert [row.tokens for row in load_plan(tmp_path / "p.json").budget.lengths] == [512]


@pytest.mark.parametrize("kind", ["evaluate", "ablate", "recall"])
def test_status_shows_the_progress_of_arms(
    kind: RunKind, scan: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    store = scan[0]
    run = store.begin_run(RunRecord(kind, "some", "tiny", LAYERS, HEADS, config={"requests": 20})).run_id
    arms = [begin_arm(store, run, name, "baseline") for name in ("baseline", "other", "third")]
    import pyarrow as pa

    store.finish_arm(arms[0], pa.table({"task": ["t"], "question": [0], "correct": [1.0]}))
    unit = {"unit": "u", "what": "answers", "arm_id": arms[1], "numbers": [-1.0, 1.0, 0.0] * 7}
    store.add_units(run, pa.Table.from_pylist([unit]))
    assert main(["status", "--store", str(store.path)]) == 0
    assert "1/3 arms, 7/40 requests of the others" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["evalute"], "unknown verb 'evalute'; did you mean evaluate"),
        (["demo", "--questions", "0"], "--questions: 0 (limit 1). Raise it"),
        (["rank", "--by", "zzz"], "names)"),
    ],
)
def test_errors_are_short(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    line = capsys.readouterr().err
    assert message in line
    assert len(line) < 320


def test_heads_are_separated_by_commas_or_spaces() -> None:
    needed = ["evaluate", "demo", "--tasks", "x", "--heads"]
    for words in (["3:5,7:0"], ["3:5", "7:0"]):
        assert read_command([*needed, *words]).step.arms.heads == ((3, 5), (7, 0))


def test_an_interrupt_stops_a_long_query(scan: tuple[Store, str]) -> None:
    endless = "select count(*) from range(1000000) a, range(1000000) b, range(1000) c where a.range + b.range = c.range"
    code = (
        "import signal, sys\nfrom headscan.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background ignore it
        "print('ready', flush=True)\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "sql", endless, "--store", str(scan[0].path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as query:
        assert query.stdout is not None and query.stdout.readline() == "ready\n"
        descriptors = Path(f"/proc/{query.pid}/fd")
        opened = descriptors.exists()
        while opened and scan[0].path not in [path.resolve() for path in descriptors.iterdir()]:
            assert query.poll() is None
            time.sleep(0.05)
        time.sleep(1 if opened else 6)  # until the query runs, also on a busy machine
        query.send_signal(signal.SIGINT)
        try:
            _, err = query.communicate(timeout=60)
        finally:
            query.kill()
    assert query.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in err  # a query keeps nothing, and does not resume


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["merge", "a.duckdb", "--into", "b.duckdb"], True),
        (["scan", "demo"], True),
        (["demo"], True),
        (["study", "demo", "--corpus", "python-stdlib"], True),
        (["status"], False),
    ],
)
def test_an_interrupt_promises_to_resume_what_can_be_resumed(
    words: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(verb: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headscan.cli.main._run", interrupted)
    assert main(words) == 130
    assert ("run the same command again to resume" in capsys.readouterr().err) == kept


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "headscan", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("headscan ")


def commands_of(page: Path) -> list[list[str]]:
    """The commands that a report proposes, as words after `headscan`."""
    shown = re.findall(r"<pre class=\"command\"><code>(.*?)</code>", page.read_text(encoding="utf-8"))
    return [shlex.split(html.unescape(re.sub("</?span>", "", line)))[1:] for line in shown]


def test_a_report_s_commands_can_be_pasted(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my models") / "llama"
    shutil.copytree(model_folder, folder)
    store = ["--store", "s.duckdb"]
    scanned = ["scan", str(folder), "--corpus", str(corpus_folder), "--max-tokens", "40", "--limit-sequences", "4"]
    assert main([*scanned, "--recent", "8", *store]) == 0
    assert main(["plan", "--method", "distant_mass", "--recent", "8", "--out", "mine.json", *store]) == 0
    pasted: set[str] = set()
    for plan in ([], ["--plan", "mine.json"]):
        assert main(["report", *plan, "--out", "r.html", *store]) == 0
        for words in commands_of(Path("r.html")):
            assert getattr(read_command(words), "model", None) in (str(folder), None)
            for option, value in (("--corpus", str(corpus_folder)), ("--plan", plan[-1] if plan else "head_plan.json")):
                assert option not in words or words[words.index(option) + 1] == value
            if words[0] in {"probe", "plan"} - pasted:  # the others need a task, or take longer
                assert main(words) == 0, words
                pasted.add(words[0])
    assert pasted == {"probe", "plan"}
    # The usual window is wider than these texts; the command that is shown then measures a narrower one.
    assert main([*scanned, "--store", "short.duckdb"]) == 0
    assert main(["report", "--out", "r.html", "--store", "short.duckdb"]) == 0
    [plan] = [words for words in commands_of(Path("r.html")) if words[0] == "plan"]
    assert plan[1:3] == [str(folder), "--corpus"]
    assert main([*plan, "--sequences", "4", "--recall-prompts", "0", "--no-search", "--max-tokens", "40"]) == 0, plan


#: A missing input of each verb, with the name that its error has.
MISSING = {
    "generate demo --prompt-file p.txt --plan missing.json": "cannot read missing.json",
    "evaluate demo --plan missing.json": "cannot read missing.json",
    "report --plan missing.json --store s.duckdb": "no store at s.duckdb",
    "plan --method imported --pattern missing/": "cannot read missing",
    "prune demo --share 0.1 --out o --corpus missing/": "corpus 'missing/'",
    "prune demo --import-heads missing.json --out o": "no file missing.json",
    "prune demo --mask m --out o --store s.duckdb": "no store at s.duckdb",
    "prune demo --share 0.1 --method entropy --out o --store s.duckdb": "no store at s.duckdb",
    "evaluate demo --score entropy --store s.duckdb": "no store at s.duckdb",
    "evaluate demo --heads 0:1 --replace mean --corpus missing.txt": "corpus 'missing.txt'",
    "sweep demo --replace mean --corpus missing/": "corpus 'missing/'",
    "study demo --corpus missing/ --out o": "corpus 'missing/'",
    "plan demo --method measured --corpus missing/": "corpus 'missing/'",
    **{
        f"{verb} demo --corpus missing/": "corpus 'missing/'"
        for verb in ("scan", "importance", "gates", "ablate", "referee")
    },
    **{f"{verb} demo --data missing.tsv": "no file missing.tsv" for verb in ("importance", "ablate", "referee")},
    **{f"{verb} missing/": "no model at missing/" for verb in ("probe", "place", "models")},
    "compare 3f9a --store s.duckdb": "no store at s.duckdb",
    "rank --store s.duckdb": "no store at s.duckdb",
}


def test_missing_inputs_are_named_before_torch_is_imported(tmp_path: Path) -> None:
    """All in one process: the first verb that imports torch before its error ends the test."""
    code = (
        "import contextlib, io, json, shlex, sys\nfrom headscan.cli.main import main\n"
        "for command, message in json.loads(sys.argv[1]).items():\n"
        "    error = io.StringIO()\n"
        "    with contextlib.redirect_stderr(error):\n"
        "        code = main(shlex.split(command))\n"
        "    assert code == 2 and message in error.getvalue(), (command, code, error.getvalue())\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(MISSING)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["scan", "importance", "gates"])
def test_the_demo_has_a_corpus_everywhere(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "other"
    shutil.copytree(DEMO_FOLDER, model)
    small = ["--max-tokens", "32", "--store", str(tmp_path / "s.duckdb"), "--device", "cpu"]
    small += ["--sequences", "8", "--steps", "2"] if verb == "gates" else ["--limit-sequences", "3"]
    assert main([verb, str(model), *small]) == 2
    assert "is required" in capsys.readouterr().err
    assert main([verb, "demo", *small]) == 0
    assert "corpus: python-stdlib-heldout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["ablate", "evaluate", "gates", "importance", "plan --method measured", "probe", "prune --share 0.1 --out o",
     "referee", "scan", "study", "sweep"],
)  # fmt: skip
def test_the_demo_needs_no_texts_and_no_tasks(command: str) -> None:
    verb, *options = command.split()
    read_command([verb, "demo", *options])


def test_tasks_are_required_for_other_models() -> None:
    with pytest.raises(UsageError, match="--tasks is required"):
        read_command(["sweep", "my/model"])
    assert read_command(["evaluate", "my/model", "--held-out", "texts/"]).step.tasks.names == ()
    with pytest.raises(UsageError, match="--include-path has no effect without --tasks"):
        read_command(["evaluate", "demo", "--include-path", "tasks/"])


def test_options_are_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--prompt", "some text"]) == 2
    assert "--prompt-file" in capsys.readouterr().err


def test_a_configuration_is_no_model(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model_folder / "config.json"
    assert main(["models", str(config)]) == 2
    assert (
        capsys.readouterr().err
        == f"headscan: {config} is a file, and a model is a folder with weights. Name its folder\n"
    )


def test_similar_names_of_models_are_proposed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headscan.checkpoints.headers.hub_answers", lambda: False)
    for source, name in (("smolm2", "smollm2"), ("dmo", "demo")):
        assert main(["models", source]) == 2
        assert capsys.readouterr().err.endswith(f"; did you mean {name}?\n")
    assert main(["models", "another"]) == 2
    assert "did you mean" not in capsys.readouterr().err
