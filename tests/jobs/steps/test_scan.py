"""Scans: the rows are right, and the same however the scan was run, stopped and resumed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headscan
from headscan.catalog import PROFILES, STATISTICS, panel_names
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool, Pool, WorkError, open_pool
from headscan.errors import HeadscanError, NotFiniteError, SequenceError, UnknownNameError
from headscan.model_spec import ModelSpec
from headscan.ranking.head_ranking import rank_heads
from headscan.report.write_report import write_report
from headscan.runs.model_identity import identify
from headscan.runs.run_context import PoolFactory, Run
from headscan.statistics.registry import POSITIONAL
from headscan.steps.corpus_step import CorpusRunError
from headscan.steps.run_corpus import CorpusChangedError, CorpusRunResult, shard_size_of
from headscan.steps.run_scan import MeasureShard, run_scan
from headscan.steps.scan import Part, Scan
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from tests.jobs.conftest import THREADS, make_tokenizer
from tests.jobs.steps.killed_scans import kill_after, stored_shards
from tests.numbers.all_values import read_sites
from tests.small_models import make_model

ROWS = "select * exclude (run_id) from head_statistics order by sequence, layer, head"


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> Scan:
    tokens = TokenConfig(60, mode="chunk", min_tokens=5)
    return Scan(spec, CorpusSpec(str(corpus_folder)), tokens, shard_size=3)


def of_threads(model: ModelSpec) -> Pool:
    return open_pool(model, THREADS)


def run(config: Scan, store: Store, make_pool: PoolFactory = of_threads, **options: Any) -> CorpusRunResult:
    return run_scan(config, Run(config.model, store, make_pool, batch_tokens=150, **options))


def test_rows_equal_the_result_of_collect(config: Scan, store: Store) -> None:
    result = run(config, store)
    assert result.measured > 3
    assert result.report is not None
    rows = store.query(f"{ROWS}").to_pandas()
    assert len(rows) == result.report.sequences * 18
    assert (rows["kv_head"] == rows["head"] // 3).all()

    sequence = store.query("select * from sequences where sequence = 4").to_pylist()[0]
    alone = headscan.collect(headscan.load(config.model.source), sequence_ids(config, store, sequence))
    mine = rows[rows["sequence"] == 4].sort_values(["layer", "head"])
    assert set(alone) == set(panel_names("fast"))
    for name in STATISTICS:
        if name not in alone:
            assert mine[name].isna().all()
            continue
        torch.testing.assert_close(
            torch.tensor(mine[name].to_numpy()).reshape(3, 6), alone[name][0], rtol=1e-5, atol=1e-6, msg=name
        )


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


@pytest.mark.slow
def test_a_full_panel_has_every_number_and_profile(config: Scan, store: Store) -> None:
    full = run(dataclasses.replace(config, panel="full"), store)
    lm = headscan.load(config.model.source)
    found = store.query("from sequences order by sequence").to_pylist()
    measured = [headscan.collect(lm, sequence_ids(config, store, s), statistics=panel_names("full")) for s in found]
    everything = {name: torch.cat([one[name] for one in measured]) for name in panel_names("full")}
    rows = store.query("from head_statistics order by sequence, layer, head")
    for name, values in everything.items():
        got = torch.tensor(rows[name].to_pylist()).reshape(values.shape)
        torch.testing.assert_close(got, values, rtol=1e-5, atol=2e-6, msg=name)
    # The same through the views.
    summary = store.query("from head_summary order by layer, head")
    shares = store.query("from head_profiles order by profile, layer, head, bin")
    for name in STATISTICS:
        mean = torch.tensor(summary[name].to_pylist(), dtype=torch.float64).reshape(3, 6)
        torch.testing.assert_close(mean, everything[name].double().mean(0), rtol=1e-5, atol=1e-6, msg=name)
    expected = torch.cat([everything[name].double().mean(0).flatten() for name in sorted(PROFILES)])
    got = torch.tensor(shares["share"].to_pylist(), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    # Named one by one they are the same run; another panel is another one.
    named = dataclasses.replace(config, statistics=panel_names("full"))
    assert run(named, store, lambda _: pytest.fail("a finished scan opened a pool")).run_id == full.run_id
    assert run(config, store).run_id != full.run_id


@pytest.mark.slow
def test_every_kind_of_site_is_measured(corpus_folder: Path, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-t5"
    make_model("t5", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    tokens = TokenConfig(60, min_tokens=5)
    config = Scan(ModelSpec(str(folder)), CorpusSpec(str(corpus_folder)), tokens, "full")
    result = run(config, store)
    lm = headscan.load(str(folder))
    assert set(lm.grid.kinds) == {"self", "encoder", "cross"}
    row = store.resolve_run(result.run_id, "scan")
    assert {site["site"] for site in row["grid"]} == set(lm.grid.kinds)
    assert row["attention_path"] == "interface"
    sequence = store.query("from sequences where sequence = 3").to_pylist()[0]
    ids = sequence_ids(config, store, sequence)
    for kind in lm.grid.kinds:
        alone = headscan.collect(lm.at(kind), ids, statistics=panel_names("full"))
        mine = store.query(
            "from head_statistics where sequence = 3 and site = ? order by layer, head", [kind]
        ).to_pylist()
        assert len(mine) == 18
        for name, values in alone.items():
            for head, stored in zip(lm.at(kind).grid.heads(), mine, strict=True):
                number = values[0, head.layer, head.head]
                if stored[name] is None:
                    assert kind == "cross" and name in POSITIONAL
                    assert number.isnan().all()
                else:
                    torch.testing.assert_close(torch.tensor(stored[name]), number, rtol=1e-5, atol=2e-6, msg=name)
    by_site = {kind: rank_heads(store, result.run_id, "entropy", site=kind) for kind in lm.grid.kinds}
    for kind, ranked in by_site.items():
        entropy = store.query(
            "select avg(entropy) as mean from head_statistics where site = ? group by layer, head order by mean", [kind]
        )
        assert [head.value for head in ranked] == pytest.approx(entropy["mean"].to_pylist())
    report = write_report(store, tmp_path / "r.html", scan_run=result.run_id, scores=("entropy",)).read_text("utf-8")
    assert "also encoder and cross attention" in report
    assert {site.site for site in read_sites(store, result.run_id)} == set(by_site)


def test_the_run_records_its_settings(config: Scan, store: Store) -> None:
    result = run(config, store)
    row = store.resolve_run(result.run_id, "scan")
    assert row["status"] == "finished"
    assert (row["num_layers"], row["num_heads"], row["dtype"]) == (3, 6, "float32")
    assert row["grid"][0]["num_key_value_heads"] == 2
    assert row["packages"]["torch"] == torch.__version__
    assert row["config"]["recent"] == 256
    assert row["total_shards"] == row["finished_shards"] == result.measured


@pytest.mark.parametrize("ahead", [60, 20_000_000])
def test_cut_documents_are_counted_among_those_that_were_read(
    config: Scan, store: Store, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr("headscan.steps.run_corpus._READ_AHEAD_TOKENS", ahead)
    said: list[str] = []
    few = dataclasses.replace(config, tokens=TokenConfig(40, min_tokens=5), statistics=("entropy",))
    result = run(few, store, say=said.append)
    assert result.report is not None and result.report.documents == 10
    (line,) = [line for line in said if "documents exceed 40 tokens" in line]
    if ahead == 60:  # one shard of 3 documents
        assert " of the first 3 documents" in line
    else:
        assert line.startswith(f"{result.report.truncated} of 10 documents")


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


def test_again_is_nothing_to_do_and_another_setting_is_another_run(config: Scan, store: Store) -> None:
    first = run(config, store)
    again = run(config, store, lambda _: pytest.fail("a finished scan opened a pool"))
    assert again.already_done
    assert again.run_id == first.run_id
    few = run(dataclasses.replace(config, statistics=("entropy",)), store)
    assert few.run_id != first.run_id
    assert store.query(
        f"select count(output_norm) as n from head_statistics where run_id = '{few.run_id}'"
    ).to_pylist() == [{"n": 0}]


class Interrupted(Exception):
    pass


def test_a_stopped_scan_resumes_where_it_was(config: Scan, tmp_path: Path) -> None:
    undisturbed, stopped = Store(tmp_path / "a.duckdb"), Store(tmp_path / "b.duckdb")
    whole = run(config, undisturbed)

    class DyingPool(InProcessPool):
        def map(self, task, items):  # type: ignore[no-untyped-def]
            for count, finished in enumerate(super().map(task, items)):
                if isinstance(getattr(task, "func", task), MeasureShard) and count == 2:
                    raise Interrupted
                yield finished

    with pytest.raises(Interrupted):
        run(config, stopped, lambda model: DyingPool(model, THREADS))
    assert stopped.runs()[0]["finished_shards"] == 2
    resumed = run(config, stopped)
    assert (resumed.measured, resumed.skipped) == (whole.measured - 2, 2)
    assert resumed.run_id == whole.run_id
    assert stopped.query(ROWS).equals(undisturbed.query(ROWS))
    assert stopped.runs()[0]["corpus_hash"] == undisturbed.runs()[0]["corpus_hash"]


@pytest.mark.slow
def test_a_killed_scan_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, undisturbed = tmp_path / "killed.duckdb", tmp_path / "whole.duckdb"
    command = ["scan", str(model_folder), "--corpus", str(corpus_folder)]
    command += ["--mode", "chunk", "--max-tokens", "60", "--min-tokens", "5"]
    command += ["--shard-size", "1", "--batch-tokens", "150", "--panel", "full", "--device", "cpu", "--store"]

    seen = []
    kill_after(2, [*command, str(store)], lambda: seen.append(Store(store).runs()[0]["status"]))
    assert seen == ["running"]
    assert Store(store).runs()[0]["status"] == "interrupted"
    assert main(["status", "--store", str(store)]) == 0
    assert "interrupted" in capsys.readouterr().out
    written = stored_shards(store)
    assert 2 <= written < 20
    assert main([*command, str(store)]) == 0
    assert f"{written} stored before" in capsys.readouterr().out
    assert main([*command, str(undisturbed)]) == 0
    assert Store(store).query(ROWS).equals(Store(undisturbed).query(ROWS))
    assert Store(store).runs()[0]["status"] == "finished"


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
    message = f"{wrong} rows of head_statistics hold values that came out as NaN or infinite: NULL there"
    assert lines[-1] == message
    lines.clear()
    again = run(keeping, store, lambda _: pytest.fail("a finished scan opened a pool"), say=lines.append)
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
