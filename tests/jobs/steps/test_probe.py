"""Probes from the command line to the store; finished probes run nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headscan
from headscan.catalog import BEHAVIOURS
from headscan.cli.main import main
from headscan.cluster.pool import WorkError
from headscan.errors import ModelLoadError, SequenceError, StoreError, UnknownNameError
from headscan.measure.behaviour_probes import Needle
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.runs.run_context import PoolFactory, Run
from headscan.steps.probe import Probe
from headscan.steps.run_probe import NEEDLES, ProbeResult, _haystack, run_probe
from headscan.store.store import Store
from headscan.texts import CorpusError, CorpusSpec, open_corpus
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import of_threads, refuse
from tests.small_models import make_model

REPEATS = ("induction_score", "duplicate_token_score", "previous_token_score")


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> Probe:
    settings = BehaviourProbe(sequences=2, tokens=10, lengths=(500, 600), depths=(0.0, 0.7))
    return Probe(spec, (), CorpusSpec(str(corpus_folder)), settings)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "bare-llama"
    make_model("llama").save_pretrained(folder)
    return folder


def run(config: Probe, store: Store, make_pool: PoolFactory = of_threads) -> ProbeResult:
    with Run(config.model, store, make_pool, batch_tokens=1300) as of_model:
        return run_probe(config, of_model)


def values(store: Store, run_id: str, name: str) -> np.ndarray:
    rows = store.query(f"select {name} from behaviour_summary where run_id = ? order by layer, head", [run_id])
    return rows[name].to_numpy().reshape(3, 6)


def test_rows_equal_the_instruments_scores_and_are_measured_once(config: Probe, store: Store) -> None:
    result = run(config, store)
    assert not result.already_done

    lm = headscan.load(config.model.source)
    tokens = identify(config.model).tokenizer

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokens(text, add_special_tokens=False)["input_ids"])

    haystack = _haystack(open_corpus(config.corpus), identify(config.model), 600).tolist()
    needles = [Needle(encode(sentence), encode(cue)) for sentence, cue in NEEDLES]
    alone = headscan.probe(lm, settings=config.probe, haystack=haystack, needles=needles)
    assert list(alone) == list(BEHAVIOURS)
    for name, expected in alone.items():
        np.testing.assert_allclose(values(store, result.run_id, name), expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert 0 < alone["retrieval_score"].max() < 1  # enough of it is hit by chance for the comparison to mean something

    row = store.resolve_run(result.run_id, "probe")
    assert (row["status"], row["num_layers"], row["num_heads"], row["bos_policy"]) == ("finished", 3, 6, "always")
    assert row["config"]["lengths"] == [500, 600]
    assert row["corpus_hash"].count("-") == 1
    assert run(config, store, refuse) == ProbeResult(result.run_id, True)
    settings = replace(config.probe, seed=1)
    other = run(replace(config, probe=settings), store)
    assert other.run_id != result.run_id
    assert not np.array_equal(*(values(store, r.run_id, "induction_score") for r in (result, other)))
    # What only decides prompts that are not asked for makes no other run.
    few = Probe(config.model, ("induction_score",), probe=config.probe)
    short = run(few, store)
    longer = replace(few, probe=replace(config.probe, lengths=(700,)))
    assert run(longer, store, refuse) == ProbeResult(short.run_id, True)
    assert {r["kind"] for r in store.runs()} == {"probe"}


def test_a_probe_that_fails_starts_over(config: Probe, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise SequenceError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr("headscan.steps.run_probe.retrieval_scores", breaks)
        with pytest.raises(WorkError, match="needles in 500 tokens: made to fail"):
            run(config, store)
    assert [r["status"] for r in store.runs("probe")] == ["failed"]
    assert store.query("from head_behaviours").num_rows == 0
    result = run(config, store)
    assert [(r["run_id"], r["status"]) for r in store.runs("probe")] == [(result.run_id, "finished")]
    assert store.query("from head_behaviours").num_rows == len(BEHAVIOURS) * 18

    def full(*_: object) -> None:
        raise StoreError("made to fail")

    monkeypatch.setattr(Store, "add_behaviours", full)
    with pytest.raises(StoreError, match="made to fail"):
        run(Probe(config.model, ("induction_score",), probe=config.probe), store)
    assert sorted(r["status"] for r in store.runs("probe")) == ["failed", "finished"]


def test_a_model_without_a_tokenizer_has_the_behaviours_of_random_tokens(bare_folder: Path, store: Store) -> None:
    said: list[str] = []
    config = Probe(ModelSpec(str(bare_folder)))
    identity = identify(config.model, need_tokenizer=False)
    on_model = Run(config.model, store, of_threads, identity=identity, say=said.append)
    result = run_probe(config, on_model)
    assert "bare-llama has no tokenizer; not measured: retrieval_score" in said
    alone = headscan.probe(headscan.load(bare_folder))
    assert tuple(alone) == REPEATS
    for name, expected in alone.items():
        np.testing.assert_allclose(values(store, result.run_id, name), expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ModelLoadError, match="bare-llama has no tokenizer"):
        run(replace(config, behaviours=("retrieval_score",)), store)


def test_mistakes_are_named_before_a_model_is_loaded(config: Probe, tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    with pytest.raises(UnknownNameError, match="did you mean retrieval_score"):
        replace(config, behaviours=("retrival_score",))
    for lengths, message in (((4096,), r"`lengths=4096` .limit 1024 positions"), ((100,), "Raise lengths")):
        with pytest.raises(SequenceError, match=message):
            run(replace(config, probe=replace(config.probe, lengths=lengths)), store, refuse)
    short = tmp_path / "short.txt"
    short.write_text("so little")
    with pytest.raises(SequenceError, match="Pass more text, or lower lengths"):
        run(replace(config, corpus=CorpusSpec(str(short))), store, refuse)
    with pytest.raises(CorpusError, match="absent"):
        run(replace(config, corpus=CorpusSpec("./absent.txt")), store, refuse)
    assert not store.path.exists()


def test_lengths_that_the_model_has_room_for() -> None:
    lengths_within = BehaviourProbe().lengths_within
    assert [lengths_within(room) for room in (1024, 300, None)] == [(512, 1024), (300,), (512, 2048)]
    assert BehaviourProbe(lengths=(700, 9000)).lengths_within(1024) == (700, 9000)  # a run refuses the longer one


def test_the_command(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.duckdb"
    command = [
        "probe",
        model_folder,
        "--store",
        store,
        "--device",
        "cpu",
        "--corpus",
        corpus_folder,
        "--lengths",
        "600",
    ]
    command += ["--depths", "0", "1"]
    assert main([str(argument) for argument in command]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[1].split() == ["behaviour", "rank", "layer", "head", "value"]
    assert len(first) == 1 + 2 + 5 * len(BEHAVIOURS) + 1
    shown = [float(line.split()[4]) for line in first[3:8]]
    assert shown == sorted(shown, reverse=True)
    assert "heads with a retrieval_score above 0.1" in first[-1]
    assert main([str(argument) for argument in command]) == 0
    again = capsys.readouterr().out.splitlines()
    assert "nothing to do" in again[0]
    assert again[1:] == first[1:]

    assert main(["status", "--store", str(store)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[1:3] == ["probe", "tiny-llama"]
    assert main(["rank", "--by", "induction_score", "--limit", "2", "--store", str(store)]) == 0
    ranked = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert ranked == shown[:2]
    assert main(["rank", "--by", "induction_score", "--lowest", "--store", str(store)]) == 0
    lowest = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(lowest) == 18
    assert lowest == sorted(lowest)

    fails(capsys, [*command, "--behaviours", "telepathy"], "telepathy", "retrieval_score")
    fails(capsys, [*command, "--lengths", "99999"], "99999", "1024")
    fails(capsys, [*command, "--depths", "1.5"], "1.5")
    fails(capsys, [*command, "--seed", "-1"], "--seed: -1 (limit 0)")
    fails(capsys, ["rank", "--by", "induction_score", "--run", "zzz", "--store", store], "no probe run zzz")
