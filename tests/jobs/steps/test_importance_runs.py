"""Importance on texts and on labelled examples, from the command line to the store."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscan
from headscan.architectures import HEADS, LAYERS
from headscan.cli.main import main
from headscan.engine.arms import criterion_masks
from headscan.errors import InterventionError, SelectionError, UnknownNameError
from headscan.gradients.head_importance import default_loss
from headscan.model_spec import ModelSpec
from headscan.ranking.head_ranking import rank_importance
from headscan.runs.head_orders import find_run, stored_orders
from headscan.runs.model_identity import identify
from headscan.runs.run_context import PoolFactory, Run
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.steps import run_importance as importance_task
from headscan.steps.corpus_step import CorpusRunError
from headscan.steps.importance import Importance
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_importance import run_importance
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig, open_corpus, sequences
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import make_tokenizer, of_threads, refuse
from tests.jobs.steps.labelled_models import LABELLED, write_lines
from tests.jobs.steps.labelled_oracle import Oracle, config_of, token_gradients
from tests.small_models import make_model


@pytest.fixture
def config(spec: ModelSpec, corpus_folder: Path) -> Importance:
    plan = TokenConfig(40, mode="chunk", limit_sequences=12)
    return Importance(spec, CorpusSpec(str(corpus_folder)), plan, shard_size=6)


def run(config: Importance, store: Store, make_pool: PoolFactory = of_threads) -> CorpusRunResult:
    with Run(config.model, store, make_pool, batch_tokens=200) as of_model:
        return run_importance(config, of_model)


def rows(store: Store, run_id: str) -> list[dict]:
    return store.query(
        "select * exclude (run_id) from head_importance where run_id = ? order by site, sequence, layer, head", [run_id]
    ).to_pylist()


def test_rows_equal_the_librarys_numbers(config: Importance, store: Store) -> None:
    result = run(config, store)
    assert not result.already_done and result.skipped == 0 and result.measured > 1
    lm = headscan.load(config.model.source)
    texts = list(sequences(open_corpus(config.corpus), identify(config.model).tokenizer, config.tokens))
    found = store.query(
        "select gate_gradient, token_gradient as importance, entropy from head_importance"
        " order by sequence, layer, head"
    ).to_pydict()
    shape = (len(texts), *lm.grid.shape)
    for row, text in enumerate(texts):
        alone = headscan.importance(lm, torch.as_tensor(np.asarray(text.ids, np.int64))[None])
        for name in ("gate_gradient", "importance", "entropy"):
            ours = np.array(found[name]).reshape(shape)[row]
            np.testing.assert_allclose(ours, alone[name][0].numpy(), rtol=2e-4, atol=1e-6)
    run_row = store.resolve_run(result.run_id, "importance")
    assert (run_row["status"], run_row["finished_shards"], run_row["config"]["reduction"]) == (
        "finished",
        result.measured,
        "mean",
    )
    (counts,) = store.query("select sum(head_rows) as rows, sum(sequences) as texts from shards").to_pylist()
    assert counts == {"rows": len(texts) * 18, "texts": len(texts)}


def test_the_sum_over_tokens_and_batches_in_halves(
    config: Importance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reduction is another run; batches without enough memory are halved."""
    store, other = Store(tmp_path / "s.duckdb"), Store(tmp_path / "halved.duckdb")
    mean, total = run(config, store), run(replace(config, reduction="sum"), store)
    assert mean.run_id != total.run_id
    values = [np.array([row["gate_gradient"] for row in rows(store, each.run_id)]) for each in (mean, total)]
    tokens = store.query("select sequence, any_value(tokens) as tokens from sequences group by all order by all")
    factor = np.repeat(tokens["tokens"].to_numpy() - 1, 18)
    np.testing.assert_allclose(values[1], values[0] * factor, rtol=1e-4, atol=1e-6)
    measure = importance_task.head_gradients

    def small(lm, loss):
        if len(loss.lengths) > 1:
            raise torch.OutOfMemoryError("made to fail")
        return measure(lm, loss)

    monkeypatch.setattr(importance_task, "head_gradients", small)
    halved = [row["gate_gradient"] for row in rows(other, run(config, other).run_id)]
    np.testing.assert_allclose(halved, values[0], rtol=2e-4, atol=1e-6)


def test_recall_prompts_follow_the_texts_and_leave_their_numbers(
    config: Importance, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts' rows and scores are those of a run without prompts; importance_recall takes the prompts in."""
    config = replace(config, tokens=TokenConfig(200, mode="chunk", limit_sequences=6), shard_size=4)
    alone = run(config, store).run_id
    with pytest.raises(SelectionError, match="it measured no recall prompts"):
        rank_importance(store, alone, "importance_recall")
    both = run(replace(config, recall_prompts=4), store).run_id
    assert both != alone and run(replace(config, recall_prompts=4), store).already_done
    texts = rows(store, alone)
    assert rows(store, both)[: len(texts)] == texts
    prompts = store.query(
        "SELECT sequence, document, shard, tokens, recall_task FROM sequences WHERE run_id = ? AND recall_task IS NOT"
        " NULL ORDER BY sequence",
        [both],
    ).to_pylist()
    of_texts = store.query(
        "SELECT max(sequence) + 1 AS sequence, max(document) + 1 AS document, max(shard) + 1 AS shard FROM sequences"
        " WHERE run_id = ?",
        [alone],
    ).to_pylist()
    assert {name: prompts[0][name] for name in of_texts[0]} == of_texts[0]
    assert [row["recall_task"] for row in prompts] == ["needle@199"] * 4 + ["copying@199"] * 4
    assert {row["tokens"] for row in prompts} == {200}
    for name in ("importance", "importance_ln", "importance_entropy", "sequence_importance"):
        # DuckDB adds the rows in any order, so the last bits of a mean differ.
        heads, expected = (rank_importance(store, run_id, name) for run_id in (both, alone))
        assert [(each.layer, each.head) for each in heads] == [(each.layer, each.head) for each in expected]
        assert [each.value for each in heads] == pytest.approx([each.value for each in expected])

    newest = run(replace(config, reduction="sum"), store).run_id
    assert main(["rank", "--by", "importance_recall", "--store", str(store.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == both
    identity = identify(config.model)
    assert find_run(store, identity, "importance_recall", None) == both
    assert find_run(store, identity, "importance", None) == newest
    order = [(head.layer, head.head) for head in rank_importance(store, both, "importance_recall")]
    (mask,) = criterion_masks(store, both, "importance_recall", [0.5])
    assert mask.fixed_heads is not None and set(mask.fixed_heads) == set(order[:9])
    assert mask.name.startswith("mask importance_recall 50% of importance ")
    assert stored_orders(store, identity, ["damage", "importance_recall"], None) == {"importance_recall": order}
    with pytest.raises(UnknownNameError, match="score of masks by inactivity"):
        criterion_masks(store, both, "importance_recall", [0.5], "inactive")
    with pytest.raises(InterventionError, match=r"no finished importance of .* --recall-prompts 16` on it first"):
        find_run(store, replace(identity, name="o", config_hash="o"), "importance_recall", None)


def test_settings_out_of_range_are_named(config: Importance) -> None:
    with pytest.raises(CorpusRunError, match=r"`min_tokens=1` \(limit 2"):
        replace(config, tokens=TokenConfig(40, min_tokens=1))
    with pytest.raises(CorpusRunError, match=r"`shard_size=0` \(limit 1\)"):
        replace(config, shard_size=0)
    with pytest.raises(CorpusRunError, match="Choose mean or sum"):
        replace(config, reduction="max")  # type: ignore[arg-type]


def test_the_verb_measures_and_rank_reads(
    spec: ModelSpec, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "s.duckdb")
    command = ["importance", spec.source, "--corpus", str(corpus_folder), "--max-tokens", "40", "--store", store]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "1 shard measured, 0 stored before" in printed
    agreement = r"^{}, site self: orders of the heads by \d+ and by \d+ other sequences agree with Spearman -?\d\.\d\d"
    for name in ("importance", "sequence_importance"):
        assert re.search(agreement.format(name), printed, re.MULTILINE)
    assert main(command) == 0
    assert "is complete" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [row] = document["rows"]
    assert row == {
        "run_id": document["run_id"],
        "already_done": True,
        "measured": 0,
        "skipped": 0,
        "report": None,
        "part": None,
    }
    assert [each["by"] for each in document["halves"]] == ["importance", "sequence_importance"]
    assert main(["rank", "--by", "importance", "--store", store, "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["rank", "layer", "head", "kv_head", "importance"] and len(lines) == 5
    assert main(["status", "--store", store]) == 0
    assert "importance" in capsys.readouterr().out


def test_placements_by_ranges_are_refused(
    spec: ModelSpec, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "s.duckdb")
    command = ["importance", spec.source, "--corpus", str(corpus_folder), "--max-tokens", "40", "--store", store]
    fails(capsys, [*command, "--placement", "streamed"], "measure importance needs all layers of the model at once")


def test_rank_names_the_verb_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], config) -> None:
    store = Store(tmp_path / "s.duckdb")
    with store.connect(create=True):
        pass
    fails(capsys, ["rank", "--by", "importance", "--store", str(store.path)], "Run `headscan importance` first")


@pytest.mark.parametrize(("family", "sites"), [("bert", ["self"]), ("bart", ["cross", "encoder", "self"])])
def test_encoders_and_encoder_decoders_have_rows_for_every_site(
    family: str, sites: list[str], corpus_folder: Path, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / family
    tokenizer = make_tokenizer(300)
    tokenizer.mask_token = "</s>"
    tokenizer.save_pretrained(folder)
    make_model(family, vocabulary=300).save_pretrained(folder)
    config = Importance(ModelSpec(str(folder)), CorpusSpec(str(corpus_folder)), TokenConfig(40, mode="chunk"))
    run_id = run(config, store).run_id
    found = store.query(
        "select site, count(*) as heads, min(importance) as least from importance_summary where run_id = ?"
        " group by site order by site",
        [run_id],
    ).to_pylist()
    assert [row["site"] for row in found] == sites
    assert all(row["heads"] == 18 and row["least"] > 0 for row in found)
    lm = headscan.load(folder).at(sites[0])
    texts = list(sequences(open_corpus(config.corpus), identify(config.model).tokenizer, config.tokens))
    ids = torch.as_tensor(np.asarray(texts[2].ids, np.int64))[None]
    alone = headscan.importance(lm, ids, loss=default_loss(lm, ids, input_keys=[2]))
    rows_of = store.query(
        "select gate_gradient from head_importance where sequence = 2 and site = ? order by layer, head", [sites[0]]
    )
    ours = rows_of["gate_gradient"].to_numpy().reshape(lm.grid.shape)
    np.testing.assert_allclose(ours, alone["gate_gradient"][0].numpy(), rtol=1e-3, atol=1e-6)


def labelled_config(folder: Path, family: str) -> Importance:
    asked = config_of(folder, family)
    return Importance(asked.model, data=asked.data, shard_size=5)


def run_labelled(config: Importance, store: Store) -> CorpusRunResult:
    return run_importance(config, Run(config.model, store, of_threads))


@pytest.mark.parametrize(
    ("family", "sites"),
    [
        ("bert", ["self"]),
        ("t5", ["encoder", "self", "cross"]),
        pytest.param("distilbert", ["self"], marks=pytest.mark.slow),
        pytest.param("roberta", ["self"], marks=pytest.mark.slow),
        pytest.param("bart", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("marian", ["encoder", "self", "cross"], marks=pytest.mark.slow),
    ],
)
def test_rows_equal_gates_on_one_example(family: str, sites: list[str], tmp_path: Path, store: Store) -> None:
    config = labelled_config(tmp_path, family)
    run_id = run_labelled(config, store).run_id
    oracle = Oracle(config, family)
    found = store.query(
        "select site, gate_gradient as g from head_importance where run_id = ? order by sequence, layer, head", [run_id]
    ).to_pandas()
    ours = {site: found[found["site"] == site]["g"].to_numpy().reshape(-1, LAYERS, HEADS) for site in sites}
    assert all(len(values) == len(oracle.texts) and np.abs(values).max() > 1e-3 for values in ours.values())
    for text in oracle.texts[:4]:
        for (site, layer), gradients in token_gradients(oracle, sites, text).items():
            expected = gradients.sum((0, 1)).numpy()
            np.testing.assert_allclose(ours[site][text.index, layer], expected, rtol=2e-3, atol=2e-6)


def test_other_labels_are_another_run_and_the_same_ones_are_done(tmp_path: Path, store: Store) -> None:
    config = labelled_config(tmp_path, "bert")
    done = run_labelled(config, store)
    assert (done.measured, done.skipped) == (3, 0)
    assert run_importance(config, Run(config.model, store, refuse)) == CorpusRunResult(done.run_id, True)
    write_lines(tmp_path / "d.tsv", [line.replace("good", "bad") for line in LABELLED])
    assert run_labelled(config, store).run_id != done.run_id


@pytest.mark.parametrize(
    "without_effect", [{"corpus": CorpusSpec("c")}, {"recall_prompts": 4}, {"tokens": TokenConfig(64, mode="pack")}]
)
def test_settings_of_a_corpus_are_refused_with_examples(without_effect: dict[str, Any]) -> None:
    with pytest.raises(CorpusRunError, match=rf"`{next(iter(without_effect))}` ha(s|ve) no effect with `data`"):
        Importance(ModelSpec("m"), data=ExamplesSpec("d"), **without_effect)


def test_the_verb_reads_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    config, store = labelled_config(tmp_path, "bert"), str(tmp_path / "s.duckdb")
    command = ["importance", config.model.source, "--store", store]
    fails(capsys, command, "--corpus is required: name a text, or a file of labelled examples as --data")
    fails(capsys, [*command, "--corpus", "c"], "is a classifier, and text has no labels. Set --data")
    fails(capsys, [*command, "--corpus", "c", "--data", "d"], "--corpus has no effect with --data")
    fails(capsys, [*command, "--data", config.data.path, "--mode", "pack"], "--mode has no effect with --data")
    of_decoder = ["importance", str(model_folder), "--store", store, "--data", config.data.path]
    fails(capsys, of_decoder, "has no loss on labels. Load an encoder with a classification head")
    assert main([*command, "--data", config.data.path]) == 0
    assert "1 shard measured, 0 stored before" in capsys.readouterr().out
    assert main(["rank", "--by", "importance", "--store", store, "--limit", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
