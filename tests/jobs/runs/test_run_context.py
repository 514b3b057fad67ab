"""The identity of a model is computed once per command; its placement decides the batch size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.cli.main import main
from headscan.cluster.placement_base import PlacementError, PlacementRequest
from headscan.cluster.pool import InProcessPool
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.runs import model_identity
from headscan.runs.run_context import ModelContext, ModelOpener
from tests.jobs.conftest import THREADS


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
        ["sweep", *common, *tasks, "--scores", "entropy", "--masks", "none", "--quantiles", "0,0.2", "--controls", "1"],
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


def test_a_run_takes_the_batch_size_of_the_placement() -> None:
    """The request has precedence over the step, and is exact; the memory lowers the step's."""
    demo, limited = ModelSpec("demo"), PlacementRequest(device="cpu", memory=64 << 20)

    lines = list[str]()

    def opener(request: PlacementRequest, batch_tokens: int = BATCH_TOKENS) -> ModelOpener:
        lines.clear()
        return ModelOpener(demo, 64, request, batch_tokens, say=lines.append)

    held = opener(limited).batch_tokens
    assert 64 <= held < BATCH_TOKENS
    assert lines[1:] == [f"batches have {held} tokens instead of 8192, as many as `memory` holds"]
    assert opener(limited, 300).batch_tokens == 300 and len(lines) == 1
    assert opener(replace(limited, batch_tokens=200), 300).batch_tokens == 200
    assert opener(PlacementRequest(device="cpu")).batch_tokens == BATCH_TOKENS
    for stated in (held + 1, BATCH_TOKENS // 2, 3 * BATCH_TOKENS):
        assert opener(limited, stated).batch_tokens == held
        assert lines[1:] == [f"batches have {held} tokens instead of {stated}, as many as `memory` holds"]
    assert opener(PlacementRequest(device="cpu"), 3 * BATCH_TOKENS).batch_tokens == 3 * BATCH_TOKENS
    with pytest.raises(PlacementError, match=rf"`batch_tokens={BATCH_TOKENS}` in 64.0 MiB \(limit \d+\)"):
        opener(replace(limited, batch_tokens=BATCH_TOKENS), 300)
