"""Scans: the rows are right, and the same however the scan was run, stopped and resumed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headscan
from analysis.store import Store
from cluster.pool import InProcessPool, ModelSpec, WorkError, open_pool
from headscan.catalog import STATISTICS
from headscan.errors import HeadscanError, NotFiniteError, SequenceError, UnknownNameError
from pipelines.corpora import CorpusSpec, TokenPlan
from pipelines.identity import identify
from pipelines.scan import ScanConfig, ScanError, ScanResult, scan
from tests.pipelines.conftest import THREADS

ROWS = "select * exclude (run_id) from head_statistics order by sequence, layer, head"


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> ScanConfig:
    tokens = TokenPlan(60, mode="chunk", min_tokens=5)
    return ScanConfig(spec, CorpusSpec(str(corpus_folder)), tokens, shard_size=3, batch_tokens=150)


def run(config: ScanConfig, store: Store) -> ScanResult:
    return scan(config, store, lambda: open_pool(config.model, THREADS))


def test_rows_are_what_collect_measures(config: ScanConfig, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    result = run(config, store)
    assert result.measured > 3
    assert result.report is not None
    rows = store.query(f"{ROWS}").to_pandas()
    assert len(rows) == result.report.sequences * 18
    assert (rows["kv_head"] == rows["head"] // 3).all()

    # One sequence from the middle, measured alone.
    sequence = store.query("select * from sequences where sequence = 4").to_pylist()[0]
    lm = headscan.load(config.model.source)
    text = (Path(config.corpus.name) / Path(sequence["source"]).name).read_text()
    ids = identify(config.model).tokenizer(text)["input_ids"]
    before = store.query(
        f"select count(*) as n from sequences where sequence < 4 and document = {sequence['document']}"
    )
    start = 1 + before.to_pylist()[0]["n"] * 59
    alone = headscan.collect(lm, torch.tensor([[ids[0], *ids[start : start + 59]]]))
    assert sequence["tokens"] == len(ids[start : start + 59]) + 1
    mine = rows[rows["sequence"] == 4].sort_values(["layer", "head"])
    for name in STATISTICS:
        torch.testing.assert_close(
            torch.tensor(mine[name].to_numpy()).reshape(3, 6), alone[name][0], rtol=1e-5, atol=1e-6, msg=name
        )


def test_the_run_says_what_it_was(config: ScanConfig, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    result = run(config, store)
    row = store.resolve_run(result.run_id, "scan")
    assert row["status"] == "finished"
    assert (row["num_layers"], row["num_heads"], row["dtype"]) == (3, 6, "float32")
    assert row["grid"][0]["num_key_value_heads"] == 2
    assert row["packages"]["torch"] == torch.__version__
    assert row["config"]["recent"] == 256
    assert row["total_shards"] == row["finished_shards"] == result.measured


def test_again_is_nothing_to_do_and_another_setting_is_another_run(config: ScanConfig, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    first = run(config, store)
    again = scan(config, store, lambda: pytest.fail("a finished scan opened a pool"))
    assert again.already_done
    assert again.run_id == first.run_id
    few = run(dataclasses.replace(config, statistics=("entropy",)), store)
    assert few.run_id != first.run_id
    assert store.query(
        f"select count(output_norm) as n from head_statistics where run_id = '{few.run_id}'"
    ).to_pylist() == [{"n": 0}]


class Interrupted(Exception):
    pass


def test_a_stopped_scan_resumes_where_it_was(config: ScanConfig, tmp_path: Path) -> None:
    undisturbed, stopped = Store(tmp_path / "a.duckdb"), Store(tmp_path / "b.duckdb")
    whole = run(config, undisturbed)

    class DyingPool(InProcessPool):
        def map(self, task, items):  # type: ignore[no-untyped-def]
            for count, finished in enumerate(super().map(task, items)):
                if task.__name__ == "measure_shard" and count == 2:
                    raise Interrupted
                yield finished

    with pytest.raises(Interrupted):
        scan(config, stopped, lambda: DyingPool(config.model, THREADS))
    assert stopped.runs()[0]["finished_shards"] == 2
    resumed = run(config, stopped)
    assert (resumed.measured, resumed.skipped) == (whole.measured - 2, 2)
    assert resumed.run_id == whole.run_id
    assert stopped.query(ROWS).equals(undisturbed.query(ROWS))
    assert stopped.runs()[0]["corpus_hash"] == undisturbed.runs()[0]["corpus_hash"]


def test_a_killed_scan_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, model_folder: Path, corpus_folder: Path
) -> None:
    store, undisturbed = tmp_path / "killed.duckdb", tmp_path / "whole.duckdb"
    command = [sys.executable, "-m", "pipelines.cli.main", "scan", str(model_folder), "--corpus", str(corpus_folder)]
    command += ["--mode", "chunk", "--max-tokens", "60", "--min-tokens", "5"]
    command += ["--shard-size", "1", "--batch-tokens", "150", "--device", "cpu", "--store"]

    def shards() -> int:
        return Store(store).runs()[0]["finished_shards"] if store.exists() else 0

    wait_for_and_kill([*command, str(store)], lambda: shards() >= 2)
    landed = shards()
    finished = subprocess.run([*command, str(store)], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert f"{landed} found from before" in finished.stdout
    subprocess.run([*command, str(undisturbed)], check=True, capture_output=True, timeout=300)
    assert Store(store).query(ROWS).equals(Store(undisturbed).query(ROWS))
    assert Store(store).runs()[0]["status"] == "finished"


def wait_for_and_kill(command: list[str], reached: Callable[[], bool]) -> None:
    """Start a process and SIGKILL it as soon as it has come so far."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if reached():
                break
        except Exception:
            time.sleep(0.05)  # the store is just being written
    assert process.poll() is None, "the scan ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_changed_corpus_is_noticed_on_resume(
    config: ScanConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s.duckdb")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"text {number} " * 20)
    config = dataclasses.replace(config, corpus=CorpusSpec(str(folder)), shard_size=2)
    # A hub data set whose revision moves: the same name, other text.
    monkeypatch.setattr("pipelines.corpora.corpus.Corpus.fingerprint", lambda self: "fixed")
    state = run(config, store)
    with store.connect() as connection:
        connection.execute("update runs set status = 'failed'")
    (folder / "3.txt").write_text("another text " * 20)
    with pytest.raises(ScanError, match="the corpus has changed"):
        run(config, store)
    assert store.runs()[0]["finished_shards"] == state.measured


def test_what_a_user_can_get_wrong(config: ScanConfig, spec: ModelSpec, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    with pytest.raises(SequenceError, match="--max-tokens 5000 is more than the 1024 positions"):
        run(dataclasses.replace(config, tokens=TokenPlan(5000)), store)
    with pytest.raises(UnknownNameError, match="entrop"):
        dataclasses.replace(config, statistics=("entrop",))
    with pytest.raises(ScanError, match="--shard-size 0"):
        dataclasses.replace(config, shard_size=0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "blank.txt").write_text("  \n")
    with pytest.raises(HeadscanError, match="gave no sequence"):
        run(dataclasses.replace(config, corpus=CorpusSpec(str(tmp_path / "empty"))), store)
    assert not store.path.exists()


def test_a_number_that_is_not_finite_names_its_shard(config: ScanConfig, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    pool = InProcessPool(config.model, THREADS)
    with torch.no_grad():
        pool._model().model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(WorkError, match=r"shard 0: .*not finite in layer 1") as caught:
        scan(config, store, lambda: pool)
    assert isinstance(caught.value.__cause__, NotFiniteError)
    assert store.runs()[0]["status"] == "failed"
    assert store.query("select count(*) as n from head_statistics").to_pylist() == [{"n": 0}]
