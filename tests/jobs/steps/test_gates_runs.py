"""Gates runs from the command line to the store; interrupted ones resume with the same gates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headscan
from headscan.cli.main import main
from headscan.cluster.pool import open_pool
from headscan.errors import GateError, StoreError
from headscan.gates.fit_gates import fit_two_sided
from headscan.gates.gate_settings import GateFitConfig
from headscan.model_spec import ModelSpec
from headscan.pruning.calibration import Calibration
from headscan.ranking.head_ranking import rank_gates
from headscan.runs.model_identity import identify
from headscan.runs.run_context import Run
from headscan.steps import run_gates as pipeline
from headscan.steps.gates import Gates
from headscan.steps.run_gates import GatesResult, run_gates
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import THREADS


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> Gates:
    fit = GateFitConfig(steps=25, batch_tokens=200)
    return Gates(spec, CorpusSpec(str(corpus_folder)), fit, two_sided=True, sequences=12, max_tokens=40)


def run(config: Gates, store: Store, say: Callable[[str], None] = lambda line: None) -> GatesResult:
    pool = open_pool(config.model, THREADS)
    return run_gates(config, Run(config.model, store, lambda _: pool, batch_tokens=config.batch_tokens, say=say))


def rows(store: Store) -> list[dict]:
    return store.query("select * exclude (run_id) from head_gates order by layer, head").to_pylist()


def test_rows_and_mask_equal_the_librarys_gates(config: Gates, store: Store) -> None:
    result = run(config, store)
    lm = headscan.load(config.model.source)
    ids, lengths = map(torch.from_numpy, pipeline._token_batch(config, identify(config.model)))
    expected = fit_two_sided(lm, Calibration(ids, lengths), config.fit)
    found = rows(store)
    assert len(found) == lm.grid.total_heads
    for row in found:
        head = row["layer"], row["head"]
        assert row["gate"] == pytest.approx(float(expected.down.values[head]), abs=1e-5)
        assert row["p_open_up"] == pytest.approx(float(expected.up.open_probabilities[head]), abs=1e-5)
        assert row["class"] == expected.class_of(head)
    mask = store.mask(result.mask)
    assert mask.heads == expected.down.mask(share=0.4).heads
    assert {(row["layer"], row["head"]) for row in found if row["closed"]} == set(mask.heads)
    assert (mask.run_id, mask.criterion, mask.share) == (result.run_id, "gate", 0.4)
    ranked = rank_gates(store, result.run_id)
    assert [head.p_open for head in ranked] == sorted(row["p_open"] for row in found)
    assert run(config, store) == replace(result, already_done=True)
    assert not list(store.path.parent.glob("*.gates/*"))


def test_an_interrupted_run_resumes_with_the_same_gates(
    config: Gates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, store = Store(tmp_path / "whole.duckdb"), Store(tmp_path / "s.duckdb")
    run(config, whole)
    for stops_at in (15, 30):  # in the first and in the second fit
        left, real = [stops_at // 10], pipeline.fit_steps

        def stop(lm, item, left=left, real=real):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(lm, item)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pipeline, "fit_steps", stop)
            run(config, store)
        assert rows(store) == []
    run(config, store)
    assert rows(store) == rows(whole)


def test_heads_that_the_fit_keeps_open_are_named(config: Gates, store: Store) -> None:
    said: list[str] = []
    slow = replace(config, fit=replace(config.fit, share=0.8, steps=10, rate=0.01), two_sided=False)
    result = run(slow, store, said.append)
    assert "fewer than 80 % of the gates are closed after 10 steps; more steps follow" in said
    closed, is_open = (sum(row["closed"] and row["gate"] > least for row in rows(store)) for least in (-1.0, 0.5))
    assert is_open and len(store.mask(result.mask).heads) == closed
    assert (
        f"open in the fit (gate above 0.5): {is_open} of the {closed} heads of the mask, so share 0.8 is not reached"
        in said[-1]
    )


def test_from_the_command_line(spec: ModelSpec, corpus_folder: Path, tmp_path: Path, capsys) -> None:
    store = str(tmp_path / "s.duckdb")
    command = [
        "gates",
        spec.source,
        "--corpus",
        str(corpus_folder),
        "--store",
        store,
        "--steps",
        "5",
        "--share",
        "0.25",
    ]
    assert main([*command, "--max-tokens", "32", "--batch-tokens", "128", "--two-sided", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "heads closed" in out and "gate up" in out and "--mask gates-0.25-" in out and "--heads " in out
    assert main(["rank", "--by", "gate", "--store", store, "--limit", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    slow = [*command, "--max-tokens", "32", "--batch-tokens", "128", "--device", "cpu", "--json"]
    slow[slow.index("--share") + 1], slow[slow.index("--steps") + 1] = "0.9", "1"
    assert main(slow) == 0
    open_heads = (
        "select count(*) as n from head_gates join runs using (run_id) where closed and gate > 0.5 and run_id = ?"
    )
    found = json.loads(capsys.readouterr().out)
    assert found["open"] == Store(Path(store)).query(open_heads, [found["run_id"]])["n"].to_pylist()[0] > 0
    fails(capsys, ["rank", "--by", "gate", "--site", "cross", "--store", store], "no gates at site cross")
    fails(capsys, ["gates", spec.source, "--corpus", str(corpus_folder), "--store", store, "--share", "1"], "--share")


def test_settings_that_a_fit_refuses_and_runs_that_cannot_finish(
    config: Gates, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, message in (
        ({"fit": GateFitConfig(share=None, penalty=0.1)}, "share=None"),
        ({"sequences": 0}, "sequences=0"),
        ({"max_tokens": 15}, "max_tokens=15"),
    ):
        with pytest.raises(GateError, match=message):
            replace(config, **settings)
    with pytest.raises(GateError, match=r"`share=0\.999` closes \d+ of"):
        run(replace(config, fit=GateFitConfig(share=0.999)), store)
    finish = Store.finish_run

    def breaks(store: Store, run_id: str, **settings: Any) -> None:
        if "status" not in settings:
            raise StoreError("made to fail")
        finish(store, run_id, **settings)

    monkeypatch.setattr(Store, "finish_run", breaks)
    with pytest.raises(StoreError, match="made to fail"):
        run(replace(config, fit=replace(config.fit, steps=10), two_sided=False), store)
    assert [row["status"] for row in store.runs("gates")] == ["failed"]
