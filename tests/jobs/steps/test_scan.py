"""Scans: the rows are right, and the same however the scan was run, stopped and resumed."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import headscan
from headscan.catalog import PROFILES, STATISTICS, MassWidths, panel_names
from headscan.cli.main import main
from headscan.cluster.pool import IncompleteError, InProcessPool, WorkError
from headscan.errors import HeadscanError, NotFiniteError, SequenceError, StoreError, StoreFullError, UnknownNameError
from headscan.loading import load_spec
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.ranking.head_ranking import rank_heads
from headscan.report.write_report import write_report
from headscan.runs.model_identity import identify
from headscan.runs.run_context import PoolFactory, Run
from headscan.statistics.registry import POSITIONAL
from headscan.steps.corpus_step import CorpusRunError
from headscan.steps.run_corpus import CorpusChangedError, CorpusRunResult, ShardWriter, shard_size_of
from headscan.steps.run_scan import MeasureShard, run_scan
from headscan.steps.scan import Part, Scan
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.texts import CorpusReport, CorpusSpec, Shard, TokenConfig, open_corpus, sequences, shards
from tests.jobs.conftest import THREADS, make_tokenizer, of_threads, refuse
from tests.jobs.runs.test_resume import DyingPool, Interrupted
from tests.jobs.steps.killed_scans import kill_after, stored_shards
from tests.numbers.all_values import read_sites
from tests.small_models import make_model
from tests.sources import ROOT

ROWS = "select * exclude (run_id) from head_statistics order by sequence, layer, head"


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> Scan:
    tokens = TokenConfig(60, mode="chunk", min_tokens=5, limit_sequences=15)
    return Scan(spec, CorpusSpec(str(corpus_folder)), tokens, shard_size=3)


def run(config: Scan, store: Store, make_pool: PoolFactory = of_threads, **options: Any) -> CorpusRunResult:
    return run_scan(config, Run(config.model, store, make_pool, batch_tokens=150, **options))


def test_rows_equal_the_result_of_collect(config: Scan, store: Store) -> None:
    config = dataclasses.replace(config, tokens=TokenConfig(60, mode="chunk", min_tokens=5))
    full = dataclasses.replace(config, panel="full")
    result = run(full, store)
    assert result.measured > 3 and result.report is not None
    rows = store.query(ROWS)
    assert rows.num_rows == result.report.sequences * 18
    assert (rows["kv_head"].to_numpy() == rows["head"].to_numpy() // 3).all()
    lm = headscan.load(config.model.source)
    found = store.query("from sequences order by sequence").to_pylist()
    measured = [headscan.collect(lm, sequence_ids(config, store, s), statistics=panel_names("full")) for s in found]
    assert measured[0].keys() == set(STATISTICS) | set(PROFILES)
    summary = store.query("from head_summary order by layer, head")
    for name in measured[0]:
        values = torch.cat([one[name] for one in measured])
        got = torch.tensor(rows[name].to_pylist()).reshape(values.shape)
        torch.testing.assert_close(got, values, rtol=1e-5, atol=2e-6, msg=name)
        if name in STATISTICS:
            mean = torch.tensor(summary[name].to_pylist(), dtype=torch.float64).reshape(3, 6)
            torch.testing.assert_close(mean, values.double().mean(0), rtol=1e-5, atol=1e-6, msg=name)
    row = store.resolve_run(result.run_id, "scan")
    assert row["status"] == "finished"
    assert (row["num_layers"], row["num_heads"], row["dtype"]) == (3, 6, "float32")
    assert row["grid"][0]["num_key_value_heads"] == 2
    assert (row["packages"]["torch"], row["config"]["recent"]) == (torch.__version__, 256)
    assert row["total_shards"] == row["finished_shards"] == result.measured
    named = dataclasses.replace(config, statistics=panel_names("full"))
    for again in (full, named):
        found_again = run(again, store, refuse)
        assert (found_again.run_id, found_again.already_done) == (result.run_id, True)
    few = run(dataclasses.replace(config, statistics=("entropy",)), store)
    assert few.run_id != result.run_id
    norms = store.query(f"select count(output_norm) as n from head_statistics where run_id = '{few.run_id}'")
    assert norms.to_pylist() == [{"n": 0}]


def sequence_ids(config: Scan, store: Store, sequence: dict[str, Any]) -> torch.Tensor:
    """Tokens (1, N) of a stored sequence, cut from its document here."""
    text = (Path(config.corpus.name) / Path(sequence["source"]).name).read_text()
    ids = identify(config.model).tokenizer(text)["input_ids"]
    before = store.query(
        "select count(*) as n from sequences where sequence < ? and document = ?",
        [sequence["sequence"], sequence["document"]],
    )
    start = 1 + before.to_pylist()[0]["n"] * 59
    found = [ids[0], *ids[start : start + 59]]
    assert len(found) == sequence["tokens"]
    return torch.tensor([found])


def test_every_kind_of_site_is_measured(corpus_folder: Path, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-t5"
    make_model("t5", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    measured = ("entropy", "previous_token_weight")
    config = Scan(ModelSpec(str(folder)), CorpusSpec(str(corpus_folder)), TokenConfig(60), statistics=measured)
    result = run(config, store)
    lm = headscan.load(str(folder))
    row = store.resolve_run(result.run_id, "scan")
    assert {site["site"] for site in row["grid"]} == set(lm.grid.kinds) == {"self", "encoder", "cross"}
    assert row["attention_path"] == "interface"
    ids = sequence_ids(config, store, store.query("from sequences where sequence = 3").to_pylist()[0])
    for kind in lm.grid.kinds:
        mine = store.query("from head_statistics where sequence = 3 and site = ? order by layer, head", [kind])
        for name, values in headscan.collect(lm.at(kind), ids, statistics=measured).items():
            if kind == "cross" and name in POSITIONAL:
                assert mine[name].null_count == 18 and values.isnan().all()
            else:
                found = torch.tensor(mine[name].to_numpy()).reshape(3, 6)
                torch.testing.assert_close(found, values[0], rtol=1e-5, atol=2e-6, msg=name)
        ranked = rank_heads(store, result.run_id, "entropy", site=kind)
        entropy = store.query(
            "select avg(entropy) as mean from head_statistics where site = ? group by layer, head order by mean", [kind]
        )
        assert [head.value for head in ranked] == pytest.approx(entropy["mean"].to_pylist())
    report = write_report(store, tmp_path / "r.html", scan_run=result.run_id, scores=("entropy",)).read_text("utf-8")
    assert "also encoder and cross attention" in report
    assert {site.site for site in read_sites(store, result.run_id)} == set(lm.grid.kinds)


@pytest.mark.parametrize("ahead", [60, 20_000_000])
def test_cut_documents_are_counted_among_those_that_were_read(
    config: Scan, store: Store, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr("headscan.steps.run_corpus._READ_AHEAD_TOKENS", ahead)
    said: list[str] = []
    few = dataclasses.replace(config, tokens=TokenConfig(40, min_tokens=5), statistics=("entropy",))
    result = run(few, store, say=said.append)
    assert result.report is not None and result.report.documents == 10
    (line,) = [line for line in said if "documents of more than 40 tokens" in line]
    if ahead == 60:  # one shard of 3 documents
        assert " of the first 3 (" in line
    else:
        assert f": {result.report.truncated} of 10 (" in line


def test_a_limit_draws_from_all_files_and_says_so(config: Scan, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    few = dataclasses.replace(config, tokens=TokenConfig(40, limit_sequences=4), shard_size=1, statistics=("entropy",))
    part = run(dataclasses.replace(few, part=Part(2, 2)), store, say=said.append)
    line = r"reads 4 sequences, \d+ tokens, drawn from 4 of 10 documents in 4 of 10 files by a hash of the text"
    assert any(re.fullmatch(line, each) for each in said)
    # A begun scan keeps its order: the rest completes it.
    first = run(few, store)
    assert (first.run_id, first.measured, first.skipped) == (part.run_id, 2, 2)
    sources = store.query("select source from sequences order by sequence")["source"].to_pylist()
    assert len(set(sources)) == 4 and sources != ["00.txt", "01.txt", "02.txt", "03.txt"]
    assert run(few, store).already_done
    # Another way of drawing is another run.
    monkeypatch.setattr("headscan.steps.run_corpus.DRAWN", "in another way")
    assert run(few, store).run_id != first.run_id


def test_a_stopped_scan_resumes_where_it_was(config: Scan, tmp_path: Path) -> None:
    undisturbed, stopped = Store(tmp_path / "a.duckdb"), Store(tmp_path / "b.duckdb")
    whole = run(config, undisturbed)

    with pytest.raises(Interrupted):
        run(config, stopped, lambda model: DyingPool(model, THREADS))
    assert stopped.runs()[0]["finished_shards"] == 2
    said: list[str] = []
    resumed = run(config, stopped, say=said.append)
    assert (resumed.measured, resumed.skipped) == (whole.measured - 2, 2)
    assert said[-1] == f"run {whole.run_id}: 2 shards stored before"
    assert len(stopped.resolve_run(whole.run_id)["provenance"]) == 1
    assert resumed.run_id == whole.run_id
    assert stopped.query(ROWS).equals(undisturbed.query(ROWS))
    assert stopped.runs()[0]["corpus_hash"] == undisturbed.runs()[0]["corpus_hash"]


def test_a_changed_corpus_is_noticed_on_resume(
    config: Scan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"text {number} " * 20)
    config = dataclasses.replace(config, corpus=CorpusSpec(str(folder)), shard_size=2)
    # A hub data set whose revision moves: the same name, other text.
    monkeypatch.setattr("headscan.texts.corpus.Corpus.fingerprint", lambda self: "fixed")
    state = run(config, store)
    with store.connect() as connection:
        connection.execute("update runs set status = 'failed'")
    (folder / "3.txt").write_text("another text " * 20)
    with pytest.raises(CorpusChangedError, match=r"changed since run .* has other text"):
        run(config, store)
    assert store.runs()[0]["finished_shards"] == state.measured


def test_what_a_user_can_get_wrong(config: Scan, spec: ModelSpec, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    with pytest.raises(SequenceError, match=r"max_tokens=5000` .limit 1024 positions"):
        run(dataclasses.replace(config, tokens=TokenConfig(5000)), store)
    with pytest.raises(UnknownNameError, match="entrop"):
        dataclasses.replace(config, statistics=("entrop",))
    with pytest.raises(CorpusRunError, match=r"`panel='slow'` is unknown. Choose fast or full"):
        dataclasses.replace(config, panel="slow")  # type: ignore[arg-type]
    with pytest.raises(CorpusRunError, match="shard_size=0"):
        dataclasses.replace(config, shard_size=0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "blank.txt").write_text("  \n")
    with pytest.raises(HeadscanError, match="gave no sequence"):
        run(dataclasses.replace(config, corpus=CorpusSpec(str(tmp_path / "empty"))), store)
    assert not store.path.exists()


def broken(config: Scan, value: float) -> InProcessPool:
    """Return a pool whose model has a non-finite weight in layer 1."""
    pool = InProcessPool(config.model, THREADS)
    with torch.no_grad():
        pool._model().model.model.layers[1].self_attn.v_proj.weight[0, 0] = value
    return pool


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_names_its_sequence(config: Scan, store: Store, value: float) -> None:
    pool = broken(config, value)
    with pytest.raises(WorkError, match=r"shard 0: .*not finite in layer 1, self attention, of sequence") as caught:
        run(config, store, lambda _: pool)
    assert isinstance(caught.value.__cause__, NotFiniteError)
    assert re.search(r"of sequence \d+ \(document \d+, .*\d\d\.txt\)", str(caught.value))
    assert "keep_nonfinite=True" in str(caught.value)
    assert store.runs()[0]["status"] == "failed"
    assert store.query("select count(*) as n from head_statistics").to_pylist() == [{"n": 0}]


def test_numbers_that_are_not_finite_are_kept_as_null(config: Scan, store: Store) -> None:
    keeping = dataclasses.replace(config, keep_nonfinite=True, panel="full")
    lines: list[str] = []
    result = run(keeping, store, lambda _: broken(keeping, float("nan")), say=lines.append)
    assert result.report is not None
    # All heads of layer 2, and of layer 1 those whose KV head has the broken value.
    wrong = result.report.sequences * (6 + 3)
    run_row = store.resolve_run(result.run_id, "scan")
    assert (run_row["status"], run_row["nonfinite_rows"]) == ("finished", wrong)
    assert run_row["config"]["keep_nonfinite"] is True
    measured = store.query(
        "select layer, head, count(output_norm) as norms, count(mass_by_distance) as masses, count(*) as rows"
        " from head_statistics group by all order by all"
    ).to_pylist()
    for row in measured:
        assert row["norms"] == (0 if row["layer"] == 2 or (row["layer"] == 1 and row["head"] < 3) else row["rows"])
        assert row["masses"] == (0 if row["layer"] == 2 else row["rows"])
    # Means over what there is, and no more.
    means = store.query("select layer, head, output_norm from head_summary order by all").to_pylist()
    assert all((row["output_norm"] is None) == (seen["norms"] == 0) for row, seen in zip(means, measured, strict=True))
    message = f"rows of head_statistics with NaN or infinite values, which are NULL there: {wrong}"
    assert lines[-1] == message
    lines.clear()
    again = run(keeping, store, refuse, say=lines.append)
    assert again.already_done and lines == [message]


def test_undefined_statistics_are_not_counted_as_nonfinite(config: Scan, tmp_path: Path) -> None:
    """One token has no previous token: NULL, neither an error nor counted."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "b.txt").write_text("ada counts to nine")
    tokens = TokenConfig(60, bos="never", min_tokens=1)
    config = dataclasses.replace(config, corpus=CorpusSpec(str(tmp_path / "texts")), tokens=tokens, panel="full")
    for keep in (False, True):
        store = Store(tmp_path / f"{keep}.duckdb")
        result = run(dataclasses.replace(config, keep_nonfinite=keep), store)
        assert store.resolve_run(result.run_id, "scan")["nonfinite_rows"] == 0
        rows = store.query(
            "select tokens, count(previous_token_weight) as n, count(entropy) as all_rows from head_statistics"
            " join sequences using (run_id, sequence) group by tokens order by tokens"
        ).to_pylist()
        assert rows[0] == {"tokens": 1, "n": 0, "all_rows": 18}
        assert rows[1]["n"] == 18


def test_a_shard_takes_about_twenty_seconds_and_keeps_its_size(config: Scan, store: Store) -> None:
    """The size follows from the model; the run records it, and a resumed run keeps it."""
    chosen = dataclasses.replace(config, shard_size=None)
    open_run = Run(config.model, store, of_threads)
    small = shard_size_of(open_run, "scan", "absent", None, 60, 1.5)
    assert small == 64
    assert 1 <= shard_size_of(open_run, "scan", "absent", None, 60, 1e6) < small
    found = run(chosen, store)
    (row,) = store.runs("scan")
    assert row["config"]["shard_size"] == small and row["run_id"] == found.run_id
    assert shard_size_of(open_run, "scan", row["fingerprint"], 3, 60, 1e6) == small
    assert run(chosen, store).already_done


LONG = ["--mode", "chunk", "--max-tokens", "60", "--min-tokens", "5", "--shard-size", "4", "--batch-tokens", "150"]


class LosingPool(InProcessPool):
    """A pool that gives up shards 1 and 4, as Ray pools do after failures."""

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Any]:
        lost = []
        for item in items:
            if getattr(item, "name", None) in ("shard 1", "shard 4"):
                lost.append(item)
            else:
                yield from super().map(task, [item])
        if lost:
            raise IncompleteError(lost, "3 workers failed on it; the last: killed")


@pytest.fixture(scope="module")
def long_corpus(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So long that a scan of it takes seconds, and can be stopped."""
    folder = tmp_path_factory.mktemp("long")
    for path in corpus_folder.iterdir():
        for copy in range(5):
            (folder / f"{copy:02}-{path.name}").write_text(f"copy {copy} of {path.read_text()}")
    return folder


@pytest.fixture
def long_command(model_folder: Path, long_corpus: Path) -> list[str]:
    return ["scan", str(model_folder), "--corpus", str(long_corpus), "--device", "cpu", *LONG, "--store"]


def run_new(command: list[str], store: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "headscan.cli.main", *command, str(store)]
    return subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, timeout=300, **options)


def test_shards_that_are_given_up_are_named_and_tried_again(
    model_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lossy, whole = tmp_path / "lossy.duckdb", tmp_path / "whole.duckdb"
    command = ["scan", str(model_folder), "--corpus", str(corpus_folder), "--device", "cpu"]
    command += ["--max-tokens", "60", "--shard-size", "2", "--statistics", "entropy", "--store"]
    with monkeypatch.context() as patch:
        opener = "headscan.runs.run_context.open_pool"
        patch.setattr(opener, lambda spec, place, **options: LosingPool(spec, place))
        assert main([*command, str(lossy)]) == 3
    assert "headscan: shard 1, shard 4: 3 workers failed on it" in capsys.readouterr().err
    assert main(["status", "--store", str(lossy)]) == 0
    printed = capsys.readouterr().out
    assert "failed" in printed and "3/5" in printed
    assert main([*command, str(lossy)]) == main([*command, str(whole)]) == 0
    assert "2 shards measured, 3 stored before" in capsys.readouterr().out
    assert Store(lossy).query(ROWS) == Store(whole).query(ROWS)
    first, second = Store(lossy).runs()[0], Store(whole).runs()[0]
    assert (first["status"], first["corpus_hash"]) == ("finished", second["corpus_hash"])


def killed_after(command: list[str], store: Path, reached: Callable[[], bool]) -> None:
    """Start a scan and SIGKILL it as soon as it has come so far."""
    whole = [sys.executable, "-m", "headscan.cli.main", *command, str(store)]
    process = subprocess.Popen(whole, stdout=-3, stderr=-3, start_new_session=True, cwd=ROOT)
    try:
        while process.poll() is None and not reached():
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_scan_killed_at_random_moments_has_the_rows_of_a_quiet_one(
    long_command: list[str], tmp_path: Path, seed: int
) -> None:
    store, quiet = tmp_path / "killed.duckdb", tmp_path / "quiet.duckdb"
    generator = random.Random(seed)
    replicas = [*long_command[:-1], "--replicas", str(1 + seed % 2), "--store"]
    for _ in range(4):
        end = time.monotonic() + generator.uniform(4, 16)
        killed_after(replicas, store, lambda: time.monotonic() > end)  # noqa: B023 - called before it changes
    assert run_new(long_command, store).returncode == 0
    assert run_new(long_command, quiet).returncode == 0
    assert Store(store).query(ROWS) == Store(quiet).query(ROWS)
    assert Store(store).runs()[0]["status"] == "finished"


@pytest.mark.slow
def test_a_full_device_ends_the_scan_and_nothing_is_lost(long_command: list[str], tmp_path: Path) -> None:
    """A limit on the size of files stands in for the device."""
    store, quiet = tmp_path / "s.duckdb", tmp_path / "quiet.duckdb"
    kill_after(1, [*long_command, str(store)])
    before = stored_shards(store)
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from headscan.cli.main import main\n"
        f"sys.exit(main({[*long_command, str(store)]!r}))"
    )
    full = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert full.returncode == 2, full.stderr
    assert full.stderr.splitlines()[-1].startswith(f"headscan: cannot write {store}: no space left on its device")
    assert stored_shards(store) >= before
    assert Store(store).runs()[0]["status"] in ("failed", "interrupted")
    resumed = run_new(long_command, store)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{stored_shards(store)} stored before" not in resumed.stdout
    assert run_new(long_command, quiet).returncode == 0
    assert Store(store).query(ROWS) == Store(quiet).query(ROWS)


ENTROPY = MeasureShard(("entropy", "output_norm"), MassWidths(), 150, False)


@pytest.fixture
def shard(spec, corpus_folder) -> Shard:
    corpus = open_corpus(CorpusSpec(str(corpus_folder)))
    tokenizer = identify(spec).tokenizer
    found = sequences(corpus, tokenizer, TokenConfig(60, mode="chunk", min_tokens=5), CorpusReport())
    return next(iter(shards(found, shard_size=64)))


def test_progress_moves_with_each_pass(spec, shard: Shard) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    assert ENTROPY(lm, shard, on_pass=counts.append).heads.equals(ENTROPY(lm, shard).heads)
    assert len(counts) > 1
    assert sum(counts) == len(shard.sequences)


def test_halves_of_a_pass_count_once(spec, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    plain = MeasureShard.run

    def short_of_memory(self, lm: LoadedModel, shard: Shard, part):
        if len(part) > 1:
            raise torch.OutOfMemoryError("no room")
        return plain(self, lm, shard, part)

    monkeypatch.setattr(MeasureShard, "run", short_of_memory)
    ENTROPY(lm, shard, on_pass=counts.append)
    assert counts == [1] * len(shard.sequences)


class SlowStore(Store):
    """A store that writes on request."""

    def __init__(self) -> None:
        super().__init__("nowhere.duckdb")
        self.written: list[list[int]] = []
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.full = False

    def add_shards(self, run_id: str, shards: Iterable[ShardToWrite]) -> None:
        self.began.release()
        assert self.go_on.acquire(timeout=20)
        if self.full:
            raise StoreFullError("no space left")
        self.written.append([shard_to_write.record.shard for shard_to_write in shards])


def shard_to_write(number: int, heads: pa.Table | None = None) -> ShardToWrite:
    return ShardToWrite(ShardRecord(number, "c"), pa.table({}), pa.table({}) if heads is None else heads)


def test_shards_that_arrive_during_a_write_are_written_together() -> None:
    store = SlowStore()
    with ShardWriter(store, "run") as writer:
        writer.add(shard_to_write(0))
        assert store.began.acquire(timeout=20)
        for number in range(1, 100):
            writer.add(shard_to_write(number))
        store.go_on.release(2)
    assert store.written == [[0], list(range(1, 100))]


def test_whoever_brings_too_much_waits() -> None:
    store = SlowStore()
    large = pa.table({"entropy": np.empty(25_000_000, dtype=np.uint8)})
    with ShardWriter(store, "run") as writer:
        writer.add(shard_to_write(0))
        assert store.began.acquire(timeout=20)
        for number in range(1, 5):
            writer.add(shard_to_write(number, large))
        last = threading.Thread(target=writer.add, args=[shard_to_write(5)])
        last.start()
        last.join(0.2)
        assert last.is_alive()
        store.go_on.release(3)
        last.join(20)
        assert not last.is_alive()
    assert [number for group in store.written for number in group] == list(range(6))


def test_queued_shards_are_written_when_the_work_fails() -> None:
    store = SlowStore()
    store.go_on.release(5)
    with pytest.raises(ZeroDivisionError), ShardWriter(store, "run") as writer:
        writer.add(shard_to_write(0))
        raise ZeroDivisionError
    assert store.written == [[0]]


def test_a_full_store_is_reported_at_the_next_shard_or_at_the_end() -> None:
    store = SlowStore()
    store.full = True
    store.go_on.release(5)
    with pytest.raises(StoreFullError), ShardWriter(store, "run") as writer:
        writer.add(shard_to_write(0))
    with pytest.raises(StoreError, match="no space left"), ShardWriter(store, "run") as writer:
        for number in range(100):
            writer.add(shard_to_write(number))
    assert store.written == []
