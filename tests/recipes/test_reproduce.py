"""The reproductions of pipelines/: plans that parse, and whole runs on the demo model."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headscan.cli.main import read_command, verb_class
from tests.recipes.test_examples import EXAMPLES
from tests.sources import ROOT

FOLDER = ROOT / "pipelines"
#: What the table of a stand-in names.
SCRIPTS = {
    "inactive_heads.py": ("output_norm_ln", "paper % (14 models)"),
    "sixteen_heads.py": ("of 48", "8 of 96 heads"),
    "duo_attention.py": ("rank correlation", "1.67 x"),
    "smollm2.py": ("page ", "smollm2.md"),
}


def test_every_script_is_run() -> None:
    examples = {name.removeprefix("pipelines/") for name in (*EXAMPLES, "read_with_kvpress.py")}
    parts = {"paper_run.py", "plans.py", "question_blocks.py", "smollm2_page.py"}
    assert {path.name for path in FOLDER.glob("*.py")} - examples - parts == set(SCRIPTS)
    page = (ROOT / "docs/reproductions.md").read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in SCRIPTS)


def test_the_dependence_of_questions_of_one_block() -> None:
    """None if every question has a block of its own; their number if all of a block change alike."""
    script = runpy.run_path(str(FOLDER / "question_blocks.py"))
    design_effect, neighbours = script["design_effect"], script["neighbours"]
    changes = np.random.default_rng(0).integers(-1, 2, 60).astype(float)
    assert design_effect(changes, np.arange(60)) == pytest.approx(1)
    assert design_effect(changes.repeat(7), np.arange(60).repeat(7)) == pytest.approx(7)
    assert neighbours(changes.repeat(50)) > 0.9 and abs(neighbours(np.tile([1.0, -1.0], 500)) + 1) < 0.01


def test_the_scripts_of_the_demo_model_find_what_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER / "demo_model")  # as Python does for a script
    for name, function in (("train.py", "train_tokenizer"), ("card.py", "write_card")):
        assert function in runpy.run_path(str(FOLDER / "demo_model" / name))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_prints_commands_that_parse(
    name: str, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--stand-in"] if small else ["--model", "demo"]
    monkeypatch.setattr(sys, "argv", [name, "--dry-run", "--gpus", "2", "--out", str(out), *words])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("hours" in line and "2 devices at once" in line for line in lines)
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ headscan ")]
    assert commands
    for command in commands:
        assert isinstance(read_command(command[1:]), verb_class(command[1]))
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stand_in_prints_both_numbers(name: str, tmp_path: Path) -> None:
    if name == "smollm2.py":
        pytest.importorskip("matplotlib")
    command = [sys.executable, str(FOLDER / name), "--stand-in", "--out", str(tmp_path / "out")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=offline)
    assert done.returncode == 0, done.stderr
    for words in SCRIPTS[name]:
        assert words in done.stdout
