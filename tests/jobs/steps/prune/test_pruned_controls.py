"""Controls of pruned models: which model has which, and evaluations that fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from headscan.cli.main import main
from headscan.grid import Unit
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.save_model import save_pruned
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.saving_settings import PruneTexts
from headscan.steps.prune.prune_step import Prune
from headscan.store.store import Store
from tests.sources import ROOT


@pytest.mark.parametrize(
    ("methods", "unit", "size", "expected"),
    [
        (("damage", "entropy"), "head", {"share": 0.2}, [(2, True), (0, False)]),
        (("random", "damage"), "head", {"share": 0.2}, [(0, True), (2, False)]),
        (("layer-drop", "damage"), "head", {"share": 0.2}, [(0, False), (2, True)]),
        (("random", "layer-drop"), "head", {"share": 0.2}, [(0, True), (2, False)]),
        (("layer-drop",), "head", {"share": 0.2}, [(2, False)]),
        (("random", "entropy"), "layer", {"share": 0.2}, [(0, True), (2, False)]),
        (("random", "damage"), "layer", {"share": 0.2}, [(0, False), (2, False)]),
        (("damage", "entropy", "random"), "head", {"max_divergence": 0.1}, [(2, True), (2, True), (0, True)]),
        (("damage", "layer-drop"), "group", {"kv_bytes": 1000, "at": 10}, [(2, True), (2, False)]),
    ],
)
def test_every_size_has_its_controls(
    methods: tuple[str, ...], unit: Unit, size: dict[str, Any], expected: list[tuple[int, bool]], tmp_path: Path
) -> None:
    texts = PruneTexts(CorpusSpec("texts/"))
    step = Prune(ModelSpec("model"), out=tmp_path, methods=methods, texts=texts, unit=unit, controls=2, **size)
    wanted = step.wanted(tmp_path / "scratch")
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


def test_an_interrupted_evaluation_names_the_saved_models_and_resumes(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("headscan.steps.prune.run_prune.run_evaluation", interrupt)
        assert main([*command, "--heads", "0:1"]) != 0
    said = "".join(capsys.readouterr())
    assert f"the pruned models are saved: {tmp_path / 'smaller'}. Judge them" in said
    assert ".smaller-pruning keeps what is finished; the same command resumes" in said
    assert "Not judged." in (tmp_path / "smaller" / "README.md").read_text()
    assert (tmp_path / ".smaller-pruning" / "0-layers").is_dir()
    assert main([*command, "--heads", "0:2"]) == 2
    assert "an unfinished run with other settings" in capsys.readouterr().err

    with monkeypatch.context() as patched:
        patched.setattr("headscan.steps.prune.work_folder.save_pruned", interrupt)
        patched.setattr("headscan.steps.prune.work_folder.check_reload", interrupt)
        assert main([*command, "--heads", "0:1"]) == 0  # nothing is built again
    assert "Not judged." not in (tmp_path / "smaller" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "smaller"]
    assert main([*command, "--heads", "0:1"]) == 2
    assert "smaller holds a finished pruned model. `headscan report` shows its verdict" in capsys.readouterr().err


def test_files_of_the_user_and_running_processes_are_respected(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / ".smaller-pruning"
    work.mkdir()
    with FileLock(work / ".lock"):
        assert main([*command, "--heads", "0:1"]) == 2
    assert "is being built by another process" in capsys.readouterr().err
    (work / "settings.json").write_text(json.dumps({"settings": "0", "targets": ["."]}))
    (tmp_path / "smaller").mkdir()
    (tmp_path / "smaller" / "mine.txt").write_text("kept")
    assert main([*command, "--heads", "0:1"]) == 2
    assert "smaller is not empty. Choose a new folder" in capsys.readouterr().err
    assert (tmp_path / "smaller" / "mine.txt").read_text() == "kept"


def test_a_model_that_computes_something_else_stays_in_the_work_folder(
    command: list[str],
    new_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damage(lm: LoadedModel, folder: Path, **_: object) -> None:
        save_pruned(lm, folder)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.norm.weight"] *= 1.5
        weights["model.norm.weight"][::2] *= -1
        save_file(weights, file, {"format": "pt"})

    monkeypatch.setattr("headscan.steps.prune.work_folder.save_pruned", damage)
    monkeypatch.setattr("headscan.pruning.save_model.run_python", new_python)
    place = command.index("--tasks")
    assert main([*command[:place], *command[place + 4 :], "--heads", "0:1", "--skip-verdict"]) == 2
    assert "loaded in a fresh process, has other logits: relative error" in capsys.readouterr().err
    assert not (tmp_path / "smaller").exists()


#: Kills the process at the first call of a function in a module, if its first argument fits.
_KILLED = """
import importlib, os, signal, sys
from headscan.cli.main import main
module, name, which = sys.argv[1:4]
owner = importlib.import_module(module)
*outer, name = name.split(".")
for each in outer:
    owner = getattr(owner, each)
original = getattr(owner, name)
def dies(*args, **kwargs):
    if which == "after":
        original(*args, **kwargs)
    if which != "control" or args[1].is_control:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(owner, name, dies)
main(sys.argv[4:])
"""
_PRUNING = "headscan.steps.prune"
#: By moment: the module and function at whose call the process dies, and when.
MOMENTS = {
    "calibration": (f"{_PRUNING}.build_models", "repair", "before"),
    "saving": ("headscan.pruning.save_model", "_write", "after"),
    "controls": (f"{_PRUNING}.build_models", "write_model", "control"),
    "before the rename": (f"{_PRUNING}.work_folder", "check_reload", "after"),
    "after the rename": (f"{_PRUNING}.run_prune", "pruned_arm", "before"),
    "evaluation": ("headscan.runs.run_context", "Run.on", "before"),
}


@pytest.mark.slow
def test_a_killed_run_resumes_to_equal_files(command: list[str], tmp_path: Path) -> None:
    """The same command is killed at six moments, one after the other, and then ends."""
    words = [*command[:-1], "o", "--shares", "0.2,0.4", "--controls", "2"]
    undisturbed = [*words, "--out", str(tmp_path / "whole"), "--store", str(tmp_path / "whole.duckdb")]
    assert main(undisturbed) == 0
    for moment, (module, name, when) in MOMENTS.items():
        dying = [sys.executable, "-c", _KILLED, module, name, when, *words]
        done = subprocess.run(dying, capture_output=True, text=True, cwd=ROOT, input="", check=False)
        assert done.returncode == -signal.SIGKILL, f"{moment}: {done.stderr}"
    assert main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "smaller", "whole", "whole.duckdb"]
    whole = tmp_path / "whole"
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        if file.name not in ("README.md", "pruning.json"):  # with times
            assert (tmp_path / "smaller" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    query = "select arms.name, answers.* exclude (arm_id) from answers join arms using (arm_id) order by all"
    rows = [Store(tmp_path / name).query(query).to_pylist() for name in ("s.duckdb", "whole.duckdb")]
    assert rows[0] == rows[1] and len({row["name"] for row in rows[0]}) == 9
