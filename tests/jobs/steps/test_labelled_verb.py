"""The verb ablate on labelled examples: tables and faults; and what trained models show."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscan.cli.main import main
from headscan.store.store import Store
from headscan.verdicts.head_effects import read_effects
from tests.jobs.cli.test_cli import fails
from tests.jobs.steps.labelled_models import LABELLED, save_classifier, write_lines
from tests.jobs.steps.train_small_models import (
    coloured,
    examples,
    reversed_words,
    train_classifier,
    train_translator,
    write_examples,
)


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


@pytest.mark.slow
def test_some_heads_of_a_trained_classifier_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train_classifier(tmp_path / "m")
    data, store = write_examples(tmp_path / "dev.tsv", examples(coloured, 400, 10**6)), tmp_path / "s.duckdb"
    assert main(["ablate", str(model), "--data", str(data), "--store", str(store), "--metric", "loss"]) == 0
    run = Store(store).resolve_run(None, "ablate")
    found = read_effects(Store(store), run["run_id"])
    assert found[0].baseline < 0.1 and any(effect.significant and effect.harm > 0 for effect in found)
    assert any(abs(effect.effect) < 0.05 for effect in found)


@pytest.mark.slow
def test_some_heads_of_a_trained_translator_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train_translator(tmp_path / "m")
    data, store = write_examples(tmp_path / "dev.tsv", examples(reversed_words, 150, 10**6)), tmp_path / "s.duckdb"
    assert main(["ablate", str(model), "--data", str(data), "--store", str(store)]) == 0
    found = read_effects(Store(store), Store(store).resolve_run(None, "ablate")["run_id"])
    assert {effect.metric for effect in found} == {"bleu"} and found[0].baseline > 90
    cross = [effect for effect in found if effect.site == "cross"]
    assert any(effect.significant and effect.effect < -10 for effect in cross)
    assert any(abs(effect.effect) < 1 for effect in found)
