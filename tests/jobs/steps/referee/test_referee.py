"""The referee from the command line: choices, arms, resuming, tables, and what a user can get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import headscan
from headscan.catalog import CRITERIA
from headscan.cli.main import main, read_command
from headscan.settings.evaluation_settings import CriteriaComparison
from headscan.steps.referee import run_referee
from headscan.steps.referee.run_referee import families
from headscan.store.store import Store
from tests.jobs.cli.test_cli import fails


@pytest.fixture
def command(model_folder: Path, corpus_folder: Path, task_folder: Path, tmp_path: Path) -> list[str]:
    words = ["referee", str(model_folder), "--corpus", str(corpus_folder), "--max-tokens", "64", "--sequences", "16"]
    words += ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall", "--device", "cpu"]
    return [*words, "--controls", "1", "--store", str(tmp_path / "s.duckdb")]


def masks(store: Store) -> dict[tuple[str, float], set[tuple[int, int]]]:
    found: dict[tuple[str, float], set[tuple[int, int]]] = {}
    for row in store.query(
        "select criterion, share, layer, head from arms join mask_heads using (mask_id)"
        " where kind in ('mask', 'pruned')"
    ).to_pylist():
        found.setdefault((row["criterion"], row["share"]), set()).add((row["layer"], row["head"]))
    return found


def test_every_criterion_answers_at_every_share(
    command: list[str],
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call finds its choices and answers in the store."""
    chosen = "output_norm_ln,importance,effect,layer-drop"
    words = [*command, "--criteria", chosen, "--shares", f"{1 / 3},{2 / 3}", "--sequences", "6"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Increase of the text's loss" in out and "Change of accuracy in points" in out
    assert "Kendall's tau-b" in out and "random mask, mean" in out
    total = headscan.load(str(model_folder)).grid.total_heads
    found = masks(Store(tmp_path / "s.duckdb"))
    for name in ("output_norm_ln", "importance", "effect"):
        assert [len(found[name, share]) for share in (1 / 3, 2 / 3)] == [total // 3, 2 * total // 3]
        assert found[name, 1 / 3] < found[name, 2 / 3]
    monkeypatch.setattr(run_referee, "choose_heads", None)
    assert main(words) == 0
    assert capsys.readouterr().out.partition("\n\n")[2] == out.partition("\n\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize("repair", ["o", "mean"])
def test_repaired_models_are_compared_like_masks(
    repair: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 3 layers with 18 heads, 5 % are no layer, and 20 % about one layer, which has more heads."""
    words = [*command, "--criteria", "layer-drop,output_norm_ln", "--shares", "0.05,0.2", "--repair", repair]
    assert main(words) == 0
    out = capsys.readouterr().out
    rows = Store(tmp_path / "s.duckdb").query("select criterion, share from arms order by criterion, share").to_pylist()
    by_score = {
        row["criterion"]: [each["share"] for each in rows if each["criterion"] == row["criterion"]] for row in rows
    }
    assert by_score["output_norm_ln"] == by_score["random"] == [1 / 18, 4 / 18]
    assert by_score["layer-drop"] == [6 / 18]
    assert "random pruned, mean" in out
    assert [path.name for path in tmp_path.iterdir()] == ["s.duckdb"]  # no model is left


@pytest.mark.slow
def test_iterative_removal_measures_again(command: list[str], tmp_path: Path) -> None:
    words = [*command, "--criteria", "importance,effect,gate", "--shares", "0.25,0.5"]
    assert main(words) == 0
    once = masks(Store(tmp_path / "s.duckdb"))
    assert main([*words[:-4], "--store", str(tmp_path / "t.duckdb"), *words[-4:], "--iterative"]) == 0
    again = masks(Store(tmp_path / "t.duckdb"))
    for name in ("importance", "effect"):
        assert again[name, 0.25] == once[name, 0.25] < again[name, 0.5]  # the first step is the same
    assert again["gate", 0.5] == once["gate", 0.5]


def test_criteria_share_measurements_and_count_once() -> None:
    assert sorted(name for family in families(CRITERIA) for name in family) == sorted(CRITERIA)
    assert families(["damage", "entropy", "value_norm"]) == [("entropy", "value_norm"), ("damage",)]
    compared = CriteriaComparison(("effect", "effect"), (0.1, 0.2, 0.1))
    assert (compared.criteria, compared.shares) == (("effect",), (0.1, 0.2))
    assert read_command(["referee", "demo"]).step.compared == CriteriaComparison()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--criteria", "importnce"], "importance"),
        (["--shares", "0.99"], "share of 0.99 is all"),
        (["--shares", "1.5"], "1.5"),
        (["--controls", "-1"], "-1"),
    ],
)
def test_wrong_options_are_one_line(
    command: list[str], options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, [*command, *options], words)


def test_texts_are_required(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, ["referee", model_folder], "--corpus is required")
