"""The verb ablate on labelled examples: tables and faults; and what trained models show."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscan.cli.main import main
from tests.jobs.cli.test_cli import fails
from tests.jobs.steps.labelled_models import LABELLED, save_classifier, write_lines


@pytest.mark.slow
def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, store = str(save_classifier(tmp_path / "m")), str(tmp_path / "s.duckdb")
    data = str(write_lines(tmp_path / "d.tsv", LABELLED))
    command = ["ablate", model, "--data", data, "--store", store]
    assert main([*command, "--metric", "loss"]) == 0
    shown = capsys.readouterr().out
    assert "of 18 heads have a significant effect" in shown and "Change of loss, in nats" in shown


def test_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    data = str(write_lines(tmp_path / "d.tsv", LABELLED))
    start = ["ablate", str(model_folder), "--store", str(tmp_path / "s.duckdb")]
    fails(capsys, [*start, "--data", data], "has no loss on labels")
    fails(capsys, [*start, "--metric", "loss", "--corpus", "c"], "--metric has no effect without --data")
    fails(capsys, [*start, "--data", data, "--corpus", "c"], "--corpus has no effect with --data")
    fails(capsys, [*start, "--data", str(tmp_path / "e.tsv")], "no file")
