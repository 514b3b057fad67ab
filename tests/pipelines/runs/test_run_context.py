"""The identity of a model is computed once per command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headscan.cluster.pools.open_pool import InProcessPool
from headscan.model_spec import ModelSpec
from headscan.pipelines.cli.main import main
from headscan.pipelines.runs import model_identity
from headscan.pipelines.runs.run_context import ModelContext
from tests.pipelines.conftest import THREADS


@pytest.mark.slow
def test_a_command_hashes_the_weights_once(
    model_folder: Path, corpus_folder: Path, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    weights_hash = model_identity.weights_hash

    def counted(source: Any) -> str | None:
        hashed.append(source)
        return weights_hash(source)

    monkeypatch.setattr(model_identity, "weights_hash", counted)
    common = [model_folder, "--store", tmp_path / "s.duckdb", "--device", "cpu", "--replicas", "1"]
    tasks = ["--tasks", "counting", "--include-path", task_folder, "--no-recall", "--limit", "2"]
    for command in (
        ["scan", *common, "--corpus", corpus_folder],
        ["probe", *common, "--behaviours", "induction_score"],
        ["evaluate", *common, *tasks, "--score", "output_norm_ln", "--controls", "1"],
        ["sweep", *common, *tasks, "--scores", "entropy", "--masks", "none", "--quantiles", "0,0.2", "--seeds", "1"],
    ):
        hashed.clear()
        assert main([str(part) for part in command]) == 0
        assert hashed == [str(model_folder)], command[0]


def test_the_facts_of_a_model_are_computed_once(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessPool(spec, THREADS) as pool:
        context = ModelContext(spec, lambda _: pool)
        facts = context.facts
        monkeypatch.setattr(pool, "map", lambda *_: pytest.fail("the facts were asked again"))
        assert context.facts is facts
