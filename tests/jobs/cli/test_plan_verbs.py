"""`headscan plan` by each method and budget, `headscan export`, and the way back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from headscan.cli.main import main, read_command
from headscan.plans import HeadPlan, load_plan, planned_bytes
from headscan.settings.corpus_settings import DEMO_CORPUS
from tests.numbers.plan_fixtures import RECENT, SINK, everything, site, write_scan
from tests.numbers.plans.test_plan_methods import write_probe
from tests.stores import copy_store

LAYERS, HEADS = 4, 4
TOKENS = [64, 200]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verbs") / "s.duckdb"
    grid = [site(i, HEADS, HEADS) for i in range(LAYERS)]
    write_scan(path, grid, everything(LAYERS, HEADS, TOKENS), TOKENS)
    return path


def words_of(store: Path, out: Path | str, *words: object) -> list[str]:
    """The words of a plan from a store; without a method, by the attention of the scan."""
    method = [] if "--method" in words else ["--method", "distant_mass"]
    return ["plan", "--store", str(store), "--out", str(out), *method, *map(str, words)]


def plan(store: Path, out: Path, *words: object) -> HeadPlan:
    assert main(words_of(store, out, *words)) == 0
    return load_plan(out)


def refused(capsys: pytest.CaptureFixture[str], store: Path, *words: object) -> str:
    capsys.readouterr()
    assert main(words_of(store, "never.json", *words)) == 2
    assert not Path("never.json").exists()
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    return err


WIDTH = ("--sink", SINK, "--recent", RECENT)


def test_a_budget_is_a_share_or_bytes_at_a_length(store: Path, tmp_path: Path) -> None:
    half = plan(store, tmp_path / "a.json", *WIDTH)
    assert half.budget.window_heads == 8 and half.budget.request.kind == "window_share"
    quarter = plan(store, tmp_path / "b.json", *WIDTH, "--window-share", 0.25)
    assert quarter.budget.window_heads == 4
    limit = planned_bytes(quarter, 8192)
    sized = plan(store, tmp_path / "c.json", *WIDTH, "--kv-bytes", f"{limit}B", "--at", 8192)
    assert sized.window_heads == quarter.window_heads
    assert [row.tokens for row in sized.budget.lengths] == [4096, 8192, 32768, 131072]


@pytest.mark.parametrize("format", ["duoattention", "rlkv", "prulong"])
def test_an_exported_plan_comes_back(store: Path, tmp_path: Path, format: str) -> None:
    first = plan(store, tmp_path / "a.json", *WIDTH)
    out = tmp_path / "pattern"
    assert main(["export", format, "--plan", str(tmp_path / "a.json"), "--out", str(out)]) == 0
    again = plan(store, tmp_path / "b.json", "--method", "imported", "--pattern", out)
    kept = [[h.window for h in each.heads] for each in (first, again)]
    assert kept[0] == kept[1] and again.method == "imported"
    fewer = plan(store, tmp_path / "c.json", "--method", "imported", "--pattern", out, "--window-share", 0.25)
    assert set(fewer.window_heads) < set(first.window_heads) and fewer.budget.window_heads == 4


def test_an_inverted_pattern_is_refused_with_the_flag(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.zeros((LAYERS, HEADS))
    values[0] = 1
    np.savetxt(tmp_path / "masks_sp0.25.tsv", values, delimiter="\t")
    imported = ["--method", "imported", "--pattern", tmp_path / "masks_sp0.25.tsv", *WIDTH]
    assert "with --inverted if low" in refused(capsys, store, *imported).replace("`", "")
    turned = plan(store, tmp_path / "p.json", *imported, "--inverted")
    assert turned.window_heads == [(0, head) for head in range(HEADS)]
    trusted = plan(store, tmp_path / "p.json", *imported, "--no-inverted")
    assert len(trusted.window_heads) == 4 and (0, 0) not in trusted.window_heads


def test_probes_and_seeds_make_plans(store: Path, tmp_path: Path) -> None:
    one, two = (plan(store, tmp_path / "p.json", "--method", "random", "--seed", seed) for seed in (1, 2))
    assert one.window_heads != two.window_heads and len(one.window_heads) == len(two.window_heads) == 8
    probe = write_probe(tmp_path, retrieval_score=[[0.5, 0.0, 0.1, 0.0], [0.0, 0.3, 0.2, 0.1]])
    copied = copy_store(probe.path, tmp_path / "copy.duckdb")
    assert plan(copied, tmp_path / "p.json", "--method", "retrieval_score").window_heads == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-bytes", "2GiB"], "--kv-bytes and --at go together"),
        (["--at", "100"], "--kv-bytes and --at go together"),
        (["--kv-bytes", "2GiB", "--window-share", "0.5", "--at", "9"], "not allowed with argument"),
        (["--kv-bytes", "1B", "--at", "100", *WIDTH], "budget out of reach: 1 bytes at 100 tokens (limit"),
        (["--method", "imported"], "--method imported and --pattern go together"),
        (["--pattern", "x"], "--method imported and --pattern go together"),
        (["--inverted"], "--inverted has no effect on --method distant_mass"),
        (["--method", "imported", "--pattern", "none.tsv"], "cannot read none.tsv"),
        (["--method", "retrieval_score"], "has no probe run"),
        (["--recent", "8"], "recent of the window is too narrow: 8"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    store: Path,
    words: list[object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, store, *words).replace("`", "")


def test_windows_are_measured_by_default_and_the_demo_has_texts() -> None:
    verb = read_command(["plan", "demo", "--store", "mine.duckdb"])
    assert (verb.step.method, verb.step.corpus.name) == ("measured", DEMO_CORPUS)
    named = read_command(["plan", "MODEL", "--corpus", "texts/"])
    assert (named.step.method, named.step.corpus.name, named.step.window_share) == ("measured", "texts/", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--method measured needs a model, and texts as --corpus. Give both, or choose --method distant_mass"),
        (["--corpus", "texts/"], "--method measured needs a model"),
        (["M"], "--method measured measures windows on texts. Name them as --corpus"),
        (["--run", "3f"], "--run has no effect on --method measured (only on distant_mass, retrieval_score, imported"),
        (["--pattern", "p"], "--method imported and --pattern go together"),
        (["M", "--method", "random"], "MODEL has no effect on --method random (only on measured): leave it out"),
        (["--method", "random", "--corpus", "texts/"], "--corpus has no effect on --method random"),
    ],
)
def test_what_the_default_method_needs_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--out", "never.json", *words]) == 2
    assert message in capsys.readouterr().err and not Path("never.json").exists()


@pytest.mark.parametrize(("method", "shows"), [("distant_mass", "where heads attend"), ("random", "random numbers")])
def test_a_plan_that_measured_no_loss_says_so_with_the_command_that_judges_it(
    method: str, shows: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    plan(store, out, *WIDTH, "--method", method)
    *_, note, command, written = capsys.readouterr().out.splitlines()
    assert note == f"not a measured loss: method {method} shows {shows}. The command that judges the plan:"
    assert command.startswith("  headscan evaluate ") and written == f"written to {out}"
    words = shlex.split(command)[1:]
    assert words[-2:] == ["--store", str(store)] and words[words.index("--plan") + 1] == str(out)
    assert read_command(words).step.arms.plans == (str(out),)
    assert main([*words_of(store, out, *WIDTH, "--method", method), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["judge_command"] == command.strip()
