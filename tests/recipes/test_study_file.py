"""The study file of pipelines/: `headscan study` accepts it, and runs it on the demo model."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from headscan.model_spec import ModelSpec
from headscan.study.study_step import Study, read_study
from tests.sources import ROOT

FILE = ROOT / "pipelines/study.yaml"


def test_its_settings_are_those_of_a_study() -> None:
    config = read_study(FILE)
    assert (config.model, config.kind_count) == (ModelSpec("demo", "float32"), 3)
    given = yaml.safe_load(FILE.read_text("utf-8"))
    for field in fields(Study):
        if field.name in given and field.name not in ("model", "corpus", "judge"):
            value = given[field.name]
            expected = tuple(value) if isinstance(value, list) else type(getattr(config, field.name))(value)
            assert getattr(config, field.name) == expected


def test_the_line_that_is_commented_out_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(FILE.read_text("utf-8").replace("# tasks:", "tasks:"))
    assert read_study(tmp_path / "study.yaml").tasks.names == ("arc_easy",)


@pytest.mark.slow
def test_it_runs_on_the_demo_model(tmp_path: Path) -> None:
    smaller = "--hours 0.05 --max-tokens 128 --sequences 8 --judged-texts 20 --questions 20 --recall-questions 4"
    shares = "--shares 0.05 --window-shares 0.25 --prune-shares none --no-search --criteria output_norm_ln"
    command = ["study", "--config-file", str(FILE)]
    done = subprocess.run(
        [sys.executable, "-m", "headscan", *command, *smaller.split(), *shares.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "study/answers.json").exists()
