"""Controls of pruned models: which model has which, and evaluations that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscan.model_spec import ModelSpec
from headscan.pipelines.cli.main import main
from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig
from headscan.pipelines.pruning.pruning_units import Budget, BytesBudget, LossBudget, ShareBudget
from headscan.pipelines.pruning.run_prune import PruneConfig
from headscan.pruning.selection.units import Unit


@pytest.mark.parametrize(
    ("methods", "unit", "budget", "expected"),
    [
        (("damage", "entropy"), "head", ShareBudget(0.2), [(2, True), (0, False)]),
        (("random", "damage"), "head", ShareBudget(0.2), [(0, True), (2, False)]),
        (("layer-drop", "damage"), "head", ShareBudget(0.2), [(2, False), (0, True)]),
        (("random", "entropy"), "layer", ShareBudget(0.2), [(0, True), (2, False)]),
        (("random", "damage"), "layer", ShareBudget(0.2), [(0, False), (2, False)]),
        (("damage", "entropy", "random"), "head", LossBudget(0.1), [(2, True), (2, True), (0, True)]),
        (("damage", "layer-drop"), "group", BytesBudget(1000, 10), [(2, True), (2, False)]),
    ],
)
def test_every_size_has_its_controls(
    methods: tuple[str, ...], unit: Unit, budget: Budget, expected: list[tuple[int, bool]], tmp_path: Path
) -> None:
    evaluation = EvaluateConfig(ModelSpec("model"), ())
    config = PruneConfig(evaluation, tmp_path, (budget,), methods, unit=unit, controls=2)
    wanted = config.wanted(tmp_path / "scratch")
    assert [(len(each.random_folders), each.layers_folder is not None) for each in wanted] == expected


@pytest.fixture
def command(model_folder: Path, corpus_folder: Path, task_folder: Path, tmp_path: Path) -> list[str]:
    words = ["prune", str(model_folder), "--corpus", str(corpus_folder), "--max-tokens", "64", "--sequences", "16"]
    words += ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall", "--device", "cpu"]
    return [*words, "--store", str(tmp_path / "s.duckdb"), "--out", str(tmp_path / "smaller"), "--repair", "none"]


def test_a_control_as_large_as_the_model_is_left_out(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three layers, 90 % of the heads are three layers."""
    assert main([*command, "--share", "0.9", "--method", "random"]) == 0
    assert "no control without whole attention layers: " in "".join(capsys.readouterr())
    assert (tmp_path / "smaller" / "config.json").exists()


def test_a_failed_evaluation_names_the_saved_models(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headscan.pipelines.pruning.run_prune.evaluate", interrupt)
    assert main([*command, "--heads", "0:1"]) != 0
    assert f"the pruned models are saved: {tmp_path / 'smaller'}. Judge them" in "".join(capsys.readouterr())
    assert (tmp_path / "smaller" / "config.json").exists()
