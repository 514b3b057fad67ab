"""Runs whose inputs changed: a new run begins, and the unfinished one is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE
from headscan.model_spec import ModelSpec
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_scan import run_scan
from headscan.steps.scan import Scan
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from tests.jobs.conftest import THREADS, make_tokenizer, run_on
from tests.jobs.runs.interrupted_scans import DyingPool, Interrupted, interrupt, run
from tests.small_models import make_model


def changed_line(said: list[str], run_id: str) -> str:
    (line,) = (line for line in said if run_id in line)
    return line


def test_a_corpus_that_changed_names_the_unfinished_scan(config: Scan, store: Store) -> None:
    run_id = interrupt(config, store)
    (Path(config.corpus.name) / "07.txt").write_text("another text " * 20)
    said: list[str] = []
    new = run(config, store, say=said.append)
    assert new.run_id != run_id
    assert changed_line(said, run_id).startswith(
        f"corpus changed since run {run_id} (failed, 2 of 5 shards). A new run begins"
    )
    # It is named once: the run that began is finished, and the command finds it.
    said.clear()
    assert run(config, store, say=said.append).already_done and said == []


def test_weights_or_settings_that_changed_name_the_unfinished_scan(config: Scan, store: Store) -> None:
    run_id = interrupt(config, store)
    said: list[str] = []
    run(config, store, batch_tokens=100, say=said.append)
    assert changed_line(said, run_id).startswith(f"batch_tokens changed since run {run_id}")
    model = make_model("llama", vocabulary=300)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    model.save_pretrained(config.model.source)
    said.clear()
    run(config, store, say=said.append)
    assert changed_line(said, run_id).startswith(f"weights changed since run {run_id} (failed, 2 of 5 shards)")


@pytest.mark.slow
def test_other_commands_are_not_named(config: Scan, store: Store, tmp_path: Path) -> None:
    run_id = interrupt(config, store)
    said: list[str] = []
    texts = Path(shutil.copytree(config.corpus.name, tmp_path / "more"))
    (texts / "07.txt").write_text("another text " * 20)
    run(dataclasses.replace(config, corpus=CorpusSpec(str(texts))), store, say=said.append)
    other = tmp_path / "other-llama"
    model = make_model("llama", vocabulary=300)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    model.save_pretrained(other)
    make_tokenizer(300).save_pretrained(other)
    run(dataclasses.replace(config, model=ModelSpec(str(other))), store, say=said.append)
    assert not [line for line in said if run_id in line]


@pytest.mark.slow
def test_questions_that_changed_name_the_unfinished_evaluation(
    spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path
) -> None:
    tasks = Path(shutil.copytree(task_folder, tmp_path / "tasks"))
    described = json.loads((tasks / "counting.yaml").read_text())
    config = Evaluate(spec, TaskConfig(("counting",), include_path=str(tasks), limit=3), recall=None)
    pool = InProcessPool(spec, THREADS)
    run_id = run_evaluation(config, run_on(pool, store), [BASELINE])
    store.finish_run(run_id, status="failed")
    described["doc_to_text"] = "What follows? {{q}}"
    (tasks / "counting.yaml").write_text(json.dumps(described))
    said: list[str] = []
    assert run_evaluation(config, run_on(pool, store, say=said.append), [BASELINE]) != run_id
    assert changed_line(said, run_id).startswith(f"questions changed since run {run_id} (failed). A new run begins")


def test_a_given_shard_size_resumes_only_runs_of_this_size(
    config: Scan, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the largest size, under which stores have the runs that chose their own."""
    monkeypatch.setattr("headscan.steps.run_corpus._SHARD_SECONDS", 1e-9)
    lines: list[str] = []
    chosen, one, largest = (dataclasses.replace(config, shard_size=size) for size in (None, 1, 64))
    with pytest.raises(Interrupted):
        run_scan(chosen, Run(config.model, store, lambda _: DyingPool(config.model, THREADS)))
    (begun,) = store.runs()
    assert (begun["config"]["shard_size"], begun["finished_shards"]) == (1, 2)
    own = run(largest, store, say=lines.append)
    assert own.run_id != begun["run_id"] and own.skipped == 0
    assert any(line.startswith(f"shard_size changed since run {begun['run_id']}") for line in lines)
    assert store.resolve_run(own.run_id, "scan")["config"]["shard_size"] == 64
    resumed = run(one, store)
    assert (resumed.run_id, resumed.skipped) == (begun["run_id"], 2)
    assert run(chosen, store) == CorpusRunResult(begun["run_id"], already_done=True)
    assert run(largest, store) == CorpusRunResult(own.run_id, already_done=True)
