"""Rankings of heads by scores, importance, gates and behaviours."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

from headscan.catalog import BEHAVIOURS, IMPORTANCES, PROMPT_IMPORTANCE, SCORES, Importance, Term, TermMean, TermScale
from headscan.errors import SelectionError, StoreError, UnknownNameError
from headscan.pruning.head_values import criterion_values
from headscan.ranking.head_ranking import (
    RankedHead,
    halves_agreement,
    measured_behaviours,
    random_heads,
    rank_behaviours,
    rank_heads,
    rank_importance,
    select_heads,
    thresholds,
)
from headscan.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.store.views import importance_sql
from tests.numbers.conftest import HEADS, LAYERS, Scan, head_table, make_stats, scan_record, sequence_table, write_scan


def _order(values: np.ndarray) -> list[tuple[int, int]]:
    return [divmod(int(i), HEADS) for i in np.argsort(values.ravel(), kind="stable")]


def _pairs(ranked: list[RankedHead]) -> list[tuple[int, int]]:
    return [(r.layer, r.head) for r in ranked]


def test_the_most_inactive_head_is_first_in_both_directions(scan: Scan) -> None:
    low, high = (scan.stats[s].astype(np.float64).mean(axis=0) for s in ("output_norm", "first_token_weight"))
    ranked = rank_heads(scan.store, scan.run_id, "output_norm")
    assert _pairs(ranked) == _order(low)
    assert _pairs(rank_heads(scan.store, scan.run_id, "first_token_weight")) == _order(-high)
    assert _pairs(rank_heads(scan.store, scan.run_id, "output_norm", descending=True)) == _order(-low)
    first = ranked[0]
    assert first.value == pytest.approx(low.min())
    assert first.std == pytest.approx(scan.stats["output_norm"][:, first.layer, first.head].std(ddof=1), rel=1e-5)
    assert first.kv_head == first.head // 2
    pool = scan.stats["output_norm"]
    beyond = (pool < np.quantile(pool, 0.1))[:, first.layer, first.head].mean()
    assert first.inactive_share == pytest.approx(beyond)


def test_a_statistic_ranks_lowest_first_and_has_no_inactive_side(scan: Scan) -> None:
    mean = scan.stats["sink_mass"].astype(np.float64).mean(axis=0)
    ranked = rank_heads(scan.store, scan.run_id, "sink_mass")
    assert _pairs(ranked) == _order(mean)
    assert all(r.inactive_share is None for r in ranked)
    assert _pairs(rank_heads(scan.store, scan.run_id, "sink_mass", descending=True)) == _order(-mean)


def test_unknown_and_unmeasured_scores_have_distinct_errors(scan: Scan) -> None:
    with pytest.raises(UnknownNameError, match=r"'output_nrm_ln'; did you mean output_norm_ln"):
        rank_heads(scan.store, scan.run_id, "output_nrm_ln")
    with pytest.raises(UnknownNameError, match="did you mean"):
        thresholds(scan.store, scan.run_id, "entropie", [0.1])
    with pytest.raises(UnknownNameError, match="unknown score 'sink_mass'"):
        thresholds(scan.store, scan.run_id, "sink_mass", [0.1])
    partial = write_scan(scan.store.path, {"entropy": make_stats()["entropy"]}, "partial")
    with pytest.raises(SelectionError, match=r"has no value_norm at site self\. .* with the statistics value_norm"):
        rank_heads(scan.store, partial.run_id, "value_norm")
    with pytest.raises(SelectionError, match=r"has no site 'cross'\. Choose from self"):
        rank_heads(scan.store, partial.run_id, "entropy", site="cross")
    with pytest.raises(SelectionError, match="has no value_norm"):
        thresholds(scan.store, partial.run_id, "value_norm", [0.1])


def test_unmeasured_heads_come_last_and_are_never_selected(scan: Scan) -> None:
    entropy = make_stats()["entropy"]
    entropy[:, 1, 2] = np.nan
    ranked = rank_heads(scan.store, write_scan(scan.store.path, {"entropy": entropy}, "gap").run_id, "entropy")
    assert (ranked[-1].layer, ranked[-1].head) == (1, 2) and math.isnan(ranked[-1].value)
    assert len(select_heads(ranked, count=LAYERS * HEADS - 1)) == LAYERS * HEADS - 1
    with pytest.raises(SelectionError, match="1 to 11 measured"):
        select_heads(ranked, share=1.0)


@pytest.mark.parametrize(("share", "expected"), [(0.001, 1), (0.1, 1), (0.12, 1), (0.125, 2), (0.5, 6), (1.0, 12)])
def test_shares_round_to_the_nearest_head(share: float, expected: int) -> None:
    ranked = [RankedHead(i // 4, i % 4, 0, float(i), 0.0, 0.0) for i in range(12)]
    assert select_heads(ranked, share=share) == [divmod(i, 4) for i in range(expected)]


def test_selections_out_of_range() -> None:
    ranked = [RankedHead(0, i, 0, float(i), 0.0, 0.0) for i in range(4)]
    assert select_heads(ranked, count=3) == [(0, 0), (0, 1), (0, 2)]
    for share in (0.0, -0.1, 1.01, math.nan):
        with pytest.raises(SelectionError, match=r"out of range: .*limit above 0, at most 1"):
            select_heads(ranked, share=share)
    for count in (0, 5):
        with pytest.raises(SelectionError, match=f"{count} heads"):
            select_heads(ranked, count=count)
    for both in ({}, {"share": 0.5, "count": 1}):
        with pytest.raises(SelectionError, match="exactly one"):
            select_heads(ranked, **both)  # type: ignore[arg-type]


def test_random_heads_are_distinct_sorted_and_follow_from_the_seed() -> None:
    grid = [(layer, head) for layer in range(8) for head in range(8)]
    drawn = random_heads(grid, 16, seed=3)
    assert drawn == sorted(set(drawn)) and len(drawn) == 16 and set(drawn) <= set(grid)
    assert random_heads(reversed(grid), 16, seed=3) == drawn
    assert random_heads(grid, 16, seed=4) != drawn
    assert all(type(n) is int for pair in drawn for n in pair)
    with pytest.raises(SelectionError, match="limit 1 to 64"):
        random_heads(grid, 65, seed=0)


def test_many_thresholds_are_one_query(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    query = scan.store.query
    monkeypatch.setattr(scan.store, "query", lambda sql, *rest: (asked.append(sql), query(sql, *rest))[1])
    for score in ("entropy", "first_token_weight"):
        pool, high = scan.stats[score].astype(np.float64), SCORES[score].inactive == "high"
        found = thresholds(scan.store, scan.run_id, score, (0.3, 0, 0.05))
        assert found == pytest.approx([np.quantile(pool, 1 - q if high else q) for q in (0.3, 0, 0.05)])
    assert len(asked) == 2
    with pytest.raises(SelectionError, match=r"quantile out of range: -0.1"):
        thresholds(scan.store, scan.run_id, "entropy", [0.1, -0.1])
    with pytest.raises(SelectionError, match="0 quantiles"):
        thresholds(scan.store, scan.run_id, "entropy", [])


SEQUENCES, PROMPTS = 7, 5


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    return _random_values(0, SEQUENCES)


@pytest.fixture
def prompts() -> dict[str, np.ndarray]:
    """Losses of recall prompts are larger."""
    return {name: 30 * numbers for name, numbers in _random_values(1, PROMPTS).items()}


def _random_values(seed: int, sequences: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (sequences, LAYERS, HEADS)
    return {
        "gate_gradient": rng.normal(size=shape).astype(np.float32),
        "token_gradient": rng.gamma(9, size=shape).astype(np.float32),
        "entropy": rng.random(shape, np.float32),
    }


def write(path: Path, values: dict[str, np.ndarray], prompts: dict[str, np.ndarray] | None = None) -> tuple[Store, str]:
    """Write an importance run; ``prompts`` are the values of recall prompts, which follow the texts."""
    store = Store(path)
    shards = []
    for shard, first in enumerate((0, 4)):
        count = min(4, SEQUENCES - first)
        record = ShardRecord(shard, f"c{shard}", 0.5, "worker")
        shards.append(ShardToWrite(record, sequence_table(first, count), head_table(values, first, count)))
    if prompts is not None:
        heads = head_table(prompts, 0, PROMPTS)
        heads = heads.set_column(0, "sequence", pc.add(heads["sequence"], SEQUENCES).cast(pa.int32()))
        named = sequence_table(SEQUENCES, PROMPTS).append_column("recall_task", pa.array(["copying@9"] * PROMPTS))
        shards.append(ShardToWrite(ShardRecord(2, "c2", 0.5, "worker"), named, heads))
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("importance", "i0", "tiny", LAYERS, HEADS, corpus="texts")).run_id
        store.add_shards(run_id, shards)
        store.finish_run(run_id)
    return store, run_id


def expected(
    values: dict[str, np.ndarray], prompts: dict[str, np.ndarray], tokens: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return the scores (L, H) from their definitions."""
    on_prompts = prompts["token_gradient"].astype(np.float64).mean(0)
    importance = values["token_gradient"].astype(np.float64).mean(0)
    tokens = 10 + np.arange(SEQUENCES) if tokens is None else tokens
    entropy = (values["entropy"] / np.log(tokens)[:, None, None]).mean(0)

    def scaled(x: np.ndarray) -> np.ndarray:
        return (x - x.min()) / (x.max() - x.min())

    return {
        "importance": importance,
        "importance_ln": importance / np.linalg.norm(importance, axis=1, keepdims=True),
        "importance_entropy": 0.5 * scaled(importance) + 0.5 * (1 - scaled(entropy)),
        "sequence_importance": np.abs(values["gate_gradient"].astype(np.float64)).mean(0),
        "importance_recall": np.maximum(importance / importance.mean(), on_prompts / on_prompts.mean()),
    }


@pytest.mark.parametrize("name", IMPORTANCES)
def test_rankings_follow_the_definitions(
    values: dict[str, np.ndarray], prompts: dict[str, np.ndarray], tmp_path: Path, name: str
) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values, prompts)
    numbers = expected(values, prompts)[name]
    ranked = rank_importance(store, run_id, name)
    assert [(h.layer, h.head) for h in ranked] == [divmod(int(i), HEADS) for i in np.argsort(numbers, axis=None)]
    np.testing.assert_allclose([h.value for h in ranked], np.sort(numbers, axis=None), rtol=1e-6)
    signed = values["gate_gradient"].mean(0)
    np.testing.assert_allclose([h.mean_gate_gradient for h in ranked], [signed[h.layer, h.head] for h in ranked], 1e-4)
    # Threads add in another order, so the last bit of a mean may differ between two queries.
    highest_first = rank_importance(store, run_id, name, descending=True)
    assert [(h.layer, h.head) for h in highest_first] == [(h.layer, h.head) for h in ranked[::-1]]


@pytest.mark.parametrize("scale", get_args(TermScale))
@pytest.mark.parametrize("combined", ["sum", "largest"])
def test_another_importance_costs_an_entry(
    values: dict[str, np.ndarray],
    prompts: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    combined: Literal["sum", "largest"],
    scale: TermScale,
) -> None:
    """SQL and the values of the referee follow from the declaration alone, and agree."""
    terms = (Term("sequence_importance", scale, 0.25), Term(PROMPT_IMPORTANCE, "mean"))
    entry = Importance("importance_of_both", "0.25 of one, and the other", "headscan", terms, combined)
    monkeypatch.setitem(IMPORTANCES, entry.name, entry)
    store, _ = write(tmp_path / "s.duckdb", values, prompts)
    rows = store.query(f"FROM ({importance_sql()}) ORDER BY layer, head").to_pydict()
    means = {term.mean: torch.tensor(rows[term.mean], dtype=torch.float64).reshape(LAYERS, HEADS) for term in terms}
    np.testing.assert_allclose(criterion_values(entry.name, means).ravel().numpy(), rows[entry.name])
    if scale == "mean":
        first, second = (mean.numpy() / mean.numpy().mean() for mean in means.values())
        expected = 0.25 * first + second if combined == "sum" else np.maximum(0.25 * first, second)
        np.testing.assert_allclose(rows[entry.name], expected.ravel())


def test_sites_are_summarised_apart(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    alone = [h.value for h in rank_importance(store, run_id, "importance_entropy")]
    cross = {name: 3 * numbers for name, numbers in values.items()}
    record = ShardRecord(9, "c9", 0.5, "worker")
    store.add_shards(run_id, [ShardToWrite(record, sequence_table(50, 3), head_table(cross, 0, 3, site="cross"))])
    assert [h.value for h in rank_importance(store, run_id, "importance_entropy")] == alone
    assert len(rank_importance(store, run_id, "importance", site="cross")) == LAYERS * HEADS


def test_a_layer_without_importance_is_the_least_important(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    values["token_gradient"][:, 1] = 0
    store, run_id = write(tmp_path / "s.duckdb", values)
    ranked = rank_importance(store, run_id, "importance_ln")
    assert [(h.layer, h.value) for h in ranked[:HEADS]] == [(1, 0.0)] * HEADS
    assert all(h.value > 0 for h in ranked[HEADS:])


@pytest.mark.parametrize("layers", [slice(1, 2), slice(None)])
@pytest.mark.parametrize("constant", [0, 3])
def test_zero_and_constant_importances_rank_alike_in_sql_and_in_the_process(
    values: dict[str, np.ndarray], prompts: dict[str, np.ndarray], tmp_path: Path, constant: float, layers: slice
) -> None:
    for numbers in (*values.values(), *prompts.values()):
        numbers[:, layers] = constant
    store, _ = write(tmp_path / "s.duckdb", values, prompts)
    rows = store.query(f"FROM ({importance_sql()}) ORDER BY layer, head").to_pydict()
    measured = get_args(TermMean)
    means = {name: torch.tensor(rows[name], dtype=torch.float64).reshape(LAYERS, HEADS) for name in measured}
    for name in IMPORTANCES:
        found = criterion_values(name, means).ravel().numpy()
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, rows[name], atol=1e-12, err_msg=name)


def test_mistakes_are_named(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    with pytest.raises(UnknownNameError, match="importance_ln"):
        rank_importance(store, run_id, "importance_layer")
    with pytest.raises(SelectionError, match=r"no importance_recall: it measured no recall prompts\."):
        rank_importance(store, run_id, "importance_recall")
    assert halves_agreement(store, run_id, "importance_recall") is None
    with pytest.raises(SelectionError, match="no importance at site encoder"):
        rank_importance(store, run_id, site="encoder")
    record = ShardRecord(3, "c3", 0.5, "worker")
    with pytest.raises(
        StoreError, match=r"the heads table has wrong columns.*optional: gate_gradient, entropy, token_gradient\)"
    ):
        store.add_shards(run_id, [ShardToWrite(record, sequence_table(60, 2), head_table(make_stats(), 0, 2))])
    scan = store.begin_run(scan_record()).run_id
    with pytest.raises(StoreError, match="Add or remove gate_gradient, token_gradient"):
        store.add_shards(scan, [ShardToWrite(record, sequence_table(0, 2), head_table(values, 0, 2))])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"entropy": np.nan}, r"no sequence has 2 tokens and a finite entropy\. Measure other texts"),
        (
            {"gate_gradient": np.nan, "token_gradient": np.nan},
            r"its gradients are not finite\. Measure again in another",
        ),
    ],
)
def test_an_importance_that_is_undefined_says_why(
    values: dict[str, np.ndarray], tmp_path: Path, changed: dict[str, float], why: str
) -> None:
    for name, number in changed.items():
        values[name][:] = number
    store, run_id = write(tmp_path / "s.duckdb", values)
    with pytest.raises(SelectionError, match=rf"^run {run_id} has no importance_entropy: {why}"):
        rank_importance(store, run_id, "importance_entropy")


@pytest.mark.parametrize("name", IMPORTANCES)
def test_halves_are_every_other_document(
    values: dict[str, np.ndarray], prompts: dict[str, np.ndarray], tmp_path: Path, name: str
) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values, prompts)
    documents = store.query("SELECT document FROM sequences ORDER BY sequence")["document"].to_pylist()
    assert documents == list(range(SEQUENCES + PROMPTS))  # each sequence is a document
    tokens = 10 + np.arange(SEQUENCES)
    orders = []
    for half, of_prompts in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        part = {key: numbers[half] for key, numbers in values.items()}
        asked = {key: numbers[of_prompts] for key, numbers in prompts.items()}
        orders.append(expected(part, asked, tokens[half])[name].ravel())
    found = halves_agreement(store, run_id, name)
    assert found is not None and found.sequences == ((6, 6) if name == "importance_recall" else (4, 3))
    assert found.spearman == pytest.approx(spearmanr(*orders).statistic, abs=1e-4)
    assert found.kendall == pytest.approx(kendalltau(*orders).statistic, abs=1e-4)


def test_halves_of_one_long_document_are_every_other_sequence(values: dict[str, np.ndarray], tmp_path: Path) -> None:
    store, run_id = write(tmp_path / "s.duckdb", values)
    alone = halves_agreement(store, run_id)
    with store.connect() as connection:
        connection.execute("UPDATE sequences SET document = 0")
    together = halves_agreement(store, run_id)
    assert alone is not None and not alone.share_documents and "same documents" not in alone.line()
    assert together == replace(alone, share_documents=True)  # sequences were documents before
    assert together is not None and "other sequences of the same documents agree" in together.line()
    with store.connect() as connection:
        connection.execute("DELETE FROM sequences WHERE sequence > 0")
        connection.execute("DELETE FROM head_importance WHERE sequence > 0")
    assert halves_agreement(store, run_id) is None


def rows(*values: float, behaviour: str = "induction_score") -> pa.Table:
    """Two heads a layer, from layer 0 on."""
    return pa.table(
        {
            "site": ["self"] * len(values),
            "layer": pa.array([i // 2 for i in range(len(values))], pa.int16()),
            "head": pa.array([i % 2 for i in range(len(values))], pa.int16()),
            "behaviour": [behaviour] * len(values),
            "value": pa.array(values, pa.float32()),
        }
    )


def test_rows_take_the_place_of_earlier_ones_and_come_back_ranked(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("probe", "p0", "tiny", 2, 2)).run_id
    store.add_behaviours(run_id, rows(0.1, 0.2, 0.3, 0.4))
    both = pa.concat_tables([rows(0.5, 0.25, 0.75, 0.5), rows(0.0, 1.0, behaviour="retrieval_score")])
    store.add_behaviours(run_id, both)
    found = [(head.layer, head.head, head.value) for head in rank_behaviours(store, run_id, "induction_score")]
    assert found == [(1, 0, 0.75), (0, 0, 0.5), (1, 1, 0.5), (0, 1, 0.25)]
    weakest = rank_behaviours(store, run_id, "induction_score", descending=False)
    assert [(head.layer, head.head) for head in weakest] == [(0, 1), (0, 0), (1, 1), (1, 0)]  # ties in the same order
    assert measured_behaviours(store, run_id) == ("induction_score", "retrieval_score")
    assert store.query("from behaviour_summary").num_rows == 0, "the probe is not finished"
    store.finish_run(run_id)
    summary = store.query("from behaviour_summary order by layer, head")
    assert summary.column_names == ["run_id", "model", "site", "layer", "head", *BEHAVIOURS]
    assert summary["induction_score"].to_pylist() == [0.5, 0.25, 0.75, 0.5]
    assert summary["retrieval_score"].to_pylist() == [0.0, 1.0, None, None]
    assert summary["previous_token_score"].null_count == 4


def test_missing_behaviours_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("probe", "p0", "tiny", 2, 2)).run_id
    with pytest.raises(SelectionError, match="has no retrieval_score"):
        rank_behaviours(store, run_id, "retrieval_score")
    with pytest.raises(StoreError, match="no run 0000"):
        store.add_behaviours("0000", rows(0.5))
    with pytest.raises(StoreError, match="Add or remove layer"):
        store.add_behaviours(run_id, rows(0.5).drop_columns("layer"))
