from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscan.plans import HeadPlan, PlanError, check_model, load_plan, make_plan
from headscan.store.output_files import OutputError
from headscan.store.store import Store
from headscan.windows import DROPPED, Window
from tests.numbers.plan_fixtures import RECENT, SINK, masses, site, unrecorded, write_scan

TOKENS = [40, 100, 15, 20]  # the last two have no distant keys
GRID = [site(0, 4, 2), site(1, 4, 2), site(2, 4, 4, window=32)]

#: As in DeepSeek: keys of 12 and values of 10 are made of a latent of 16 and a key of 4 that all heads share.
LATENT = site(0, 4, 4) | {"head_dim": 12, "value_dim": 10, "cache_heads": 1, "cache_bytes_per_token": 2 * (16 + 4)}

#: (layers, heads); the third layer slides.
NEED = np.array([[0.9, 0.0, 0.1, 0.2], [0.3, 0.4, 0.01, 0.0], [0.0, 0.0, 0.0, 0.0]])


def _plan(store: Store, run_id: str, **changes: Any) -> HeadPlan:
    return make_plan(store, run_id, **{"window_share": 0.5, "sink": SINK, "recent": RECENT} | changes)


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str]]:
    found = write_scan(tmp_path_factory.mktemp("plan") / "s.duckdb", GRID, masses(NEED, TOKENS), TOKENS)
    with found[0].reading():
        yield found


@pytest.fixture(scope="module")
def plan(scan: tuple[Store, str]) -> HeadPlan:
    return _plan(*scan)


def test_a_kv_head_is_kept_if_any_of_its_query_heads_needs_it(plan: HeadPlan) -> None:
    heads = {(h.layer, h.kv_head): h for h in plan.heads}
    assert plan.window_heads == [(0, 1), (1, 1)]
    scores = [heads[place].score for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert scores == pytest.approx([1, 0.2 / 0.9, 0.4 / 0.9, 0.01 / 0.9], rel=1e-4)
    kept, window = heads[0, 0], heads[0, 1]
    assert (kept.head_class, kept.window) == ("retrieval", None)
    assert (window.head_class, window.window) == ("streaming", Window(SINK, RECENT))
    assert len(plan.query_heads) == 12 and plan.query_heads[0].need == pytest.approx(0.9, rel=1e-4)


def test_sliding_layers_are_protected_however_little_they_need(scan: tuple[Store, str]) -> None:
    plan = _plan(*scan, window_share=1.0)
    sliding = [h for h in plan.heads if h.layer == 2]
    assert {(h.head_class, h.window, h.score, h.keep_score) for h in sliding} == {("protected", None, None, 1.0)}
    assert plan.budget.window_heads == 4 and plan.budget.kv_heads == 8
    assert any("4 KV heads are protected" in note for note in plan.notes)


def test_evidence_comes_from_sequences_with_distant_keys_only(plan: HeadPlan) -> None:
    calibration = plan.calibration
    assert (calibration.sequences, calibration.tokens) == (4, sum(TOKENS))
    assert (calibration.evidence_sequences, calibration.evidence_queries) == (2, 20 + 80)
    assert [(b.at_least, b.below, b.sequences) for b in calibration.length_histogram] == [
        (8, 16, 1),
        (16, 32, 1),
        (32, 64, 1),
        (64, 128, 1),
    ]
    assert plan.notes[0].startswith("2 of 4 sequences are longer than the 20 tokens")


def test_a_loud_head_needs_more_than_a_quiet_one(tmp_path: Path) -> None:
    stats = masses(np.full((1, 4), 0.5), TOKENS)
    stats["output_norm"] = stats["output_norm"] * np.array([4.0, 1.0, 3.0, 2.0])
    plan = _plan(*write_scan(tmp_path / "s.duckdb", [site(0, 4, 4)], stats, TOKENS))
    assert plan.window_heads == [(0, 1), (0, 3)]
    assert [h.score for h in plan.heads] == pytest.approx([1, 0.25, 0.75, 0.5])


def test_the_budget_counts_kv_bytes(plan: HeadPlan) -> None:
    budget = plan.budget
    assert budget.window_share == 2 / 8
    per_token = (8 + 8) * 2
    for row, tokens in zip(budget.lengths, (4096, 32768, 131072), strict=True):
        whole = (4 * tokens + 4 * 31) * per_token
        saved = 2 * (tokens - SINK - RECENT) * per_token
        assert (row.tokens, row.kv_bytes, row.planned_bytes, row.saved_bytes) == (tokens, whole, whole - saved, saved)
        assert row.saved_share == saved / whole


def test_heads_without_a_part_of_the_cache_are_protected(tmp_path: Path) -> None:
    need = np.array([[0.1, 0.2, 0.3, 0.4]] * 4)
    grid = [
        LATENT,
        site(1, 4, 2),
        site(2, 4, 2, cache_heads=0, cache_bytes_per_token=0, kv_shared_from=1),
        site(3, 4, 2, cache_tokens=31),  # in chunks: no window is named
    ]
    plan = _plan(*write_scan(tmp_path / "s.duckdb", grid, masses(need, TOKENS), TOKENS), window_share=1.0)
    assert [layer.type for layer in plan.model.layers] == ["latent", "full", "shared", "sliding"]
    assert [layer.kv_bytes for layer in plan.model.layers] == [None, 32, None, 32]
    assert plan.window_heads == [(1, 0), (1, 1)]
    assert {head.head_class for head in plan.heads if head.layer != 1} == {"protected"}
    for row in plan.budget.lengths:
        assert row.kv_bytes == (40 + 64) * row.tokens + 64 * 31
        assert row.saved_bytes == 64 * (row.tokens - SINK - RECENT)
    for words in (r"4 KV heads are protected: .* \(MLA\)", "2 .* an earlier layer", "2 .* in chunks"):
        assert any(re.search(words, note) for note in plan.notes), words
    path = plan.save(tmp_path / "head_plan.json")
    assert load_plan(path) == plan
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "marked.json").write_text(path.read_text("utf-8"), encoding=encoding)
        assert load_plan(tmp_path / "marked.json") == plan
    bent = dataclasses.replace(plan.heads[-1], window=Window(SINK, RECENT))
    with pytest.raises(PlanError, match="layer 3, KV head 1 contradicts itself"):
        dataclasses.replace(plan, heads=(*plan.heads[:-1], bent))


def test_a_cache_is_needed_by_every_layer_that_reads_it(tmp_path: Path) -> None:
    """KV head (0, 0) is not needed by its own query heads, but by those of layer 2."""
    need = np.array([[0.0, 0.0, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2], [0.9, 0.0, 0.0, 0.0]])
    grid = [site(0, 4, 2), site(1, 4, 2), site(2, 4, 2, cache_heads=0, cache_bytes_per_token=0, kv_shared_from=0)]
    plan = _plan(*write_scan(tmp_path / "s.duckdb", grid, masses(need, TOKENS), TOKENS))
    assert plan.window_heads == [(0, 1), (1, 1)]
    assert [head.score for head in plan.heads[:4]] == pytest.approx([1, 0.1 / 0.9, 0.3 / 0.9, 0.2 / 0.9], rel=1e-4)
    assert "the cache of layer 0 is also read by layer 2: its scores cover those query heads" in plan.notes
    unknown = masses(need, TOKENS)
    unknown["distant_mass"][:, 2, 0] = np.nan
    plan = _plan(*write_scan(tmp_path / "u.duckdb", grid, unknown, TOKENS), window_share=1.0)
    assert plan.window_heads == [(0, 1), (1, 0), (1, 1)]


def test_a_scan_without_the_cache_counts_keys_and_values_and_reports_it(plan: HeadPlan, tmp_path: Path) -> None:
    older = _plan(*write_scan(tmp_path / "s.duckdb", [unrecorded(s) for s in GRID], masses(NEED, TOKENS), TOKENS))
    assert (older.budget, older.model, older.heads) == (plan.budget, plan.model, plan.heads)
    assert any("the scan does not record the KV cache" in note for note in older.notes)
    assert not any("does not record the KV cache" in note for note in plan.notes)


def test_layers_may_differ_in_heads(tmp_path: Path) -> None:
    stats = masses(np.array([[0.1, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.9, 0.8, 0.3, 0.4]]), TOKENS)
    plan = _plan(*write_scan(tmp_path / "s.duckdb", [site(0, 2, 1), site(2, 4, 2)], stats, TOKENS))
    assert [(h.layer, h.kv_head) for h in plan.heads] == [(0, 0), (2, 0), (2, 1)]
    assert plan.model.num_layers == 3 and plan.window_heads == [(0, 0), (2, 1)]


def test_a_kv_head_with_an_unmeasured_query_head_is_protected(tmp_path: Path) -> None:
    stats = masses(NEED[:1], TOKENS)
    stats["distant_mass"][:, 0, 3] = np.nan
    plan = _plan(*write_scan(tmp_path / "s.duckdb", [site(0, 4, 2)], stats, TOKENS), window_share=1.0)
    assert [h.head_class for h in plan.heads] == ["streaming", "protected"]
    assert any("1 KV heads are protected: not all" in note for note in plan.notes)


def test_a_contradicting_entry_is_refused(plan: HeadPlan) -> None:
    for change in ({"window": DROPPED}, {"window": Window(4, 32, 16)}, {"window": Window(4, 16), "score": None}):
        bent = (dataclasses.replace(plan.heads[0], **change), *plan.heads[1:])
        with pytest.raises(PlanError, match="layer 0, KV head 0 contradicts itself"):
            dataclasses.replace(plan, heads=bent)


def test_an_unwritable_place_is_named(plan: HeadPlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        plan.save(tmp_path / "file" / "head_plan.json")


def test_another_model_is_refused(plan: HeadPlan) -> None:
    check_model(plan, config_hash="c0ffee", weights_hash="beef", grid=GRID)
    check_model(plan, config_hash="c0ffee")
    with pytest.raises(
        PlanError, match=r"another configuration hash c0ffee, this model has decaf\. Make a plan for this model"
    ):
        check_model(plan, config_hash="decaf", weights_hash="beef")
    with pytest.raises(PlanError, match="another weights hash"):
        check_model(plan, config_hash="c0ffee", weights_hash="pork")
    with pytest.raises(PlanError, match="another head grid"):
        check_model(plan, grid=GRID[:2])
    with pytest.raises(PlanError, match="cannot check that the model is tiny"):
        check_model(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_share": 0}, r"window_share is 0 \(limit greater than 0\)"),
        ({"window_share": 1.2}, r"window_share is 1.2 \(limit less than or equal to 1\)"),
        ({"sink": SINK - 1}, r"sink of the window is too narrow: 3 \(limit 4"),
        ({"recent": RECENT - 1}, r"recent of the window is too narrow: 15 \(limit 16"),
    ],
)
def test_values_out_of_range_are_named(scan: tuple[Store, str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(*scan, **changes)


def test_short_sequences_make_no_plan(tmp_path: Path) -> None:
    short = [SINK + RECENT, 8]
    store, run_id = write_scan(tmp_path / "s.duckdb", GRID, masses(NEED, short), short)
    with pytest.raises(PlanError, match=r"longest of the 2 sequences .* has 20 tokens.*Scan longer sequences"):
        _plan(store, run_id)


@pytest.mark.parametrize(
    ("grid", "changes", "message"),
    [
        (GRID, {"config": {}}, "does not record the widths"),
        ([unrecorded(s) for s in GRID], {"dtype": None}, "does not record the KV cache and has dtype None"),
        ([unrecorded(site(0, 4, 2) | {"head_dim": 0})], {}, "does not follow from key width 0 and value width 8"),
        ([unrecorded(site(0, 4, 2) | {"head_dim": 12})], {}, "does not follow from key width 12 .* Scan again"),
        ([site(0, 4, 2, window=8)], {}, "2 KV heads are protected: the model itself bounds"),
        ([LATENT], {}, r"4 KV heads are protected: .* one latent vector a token for all heads \(MLA\)"),
        ([site(0, 4, 2, cache_heads=0, cache_bytes_per_token=0)], {}, "2 KV heads .* cache nothing"),
    ],
)
def test_scans_without_the_facts_are_refused(
    tmp_path: Path, grid: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(*write_scan(tmp_path / "s.duckdb", grid, masses(NEED, TOKENS), TOKENS, **changes))


@pytest.mark.parametrize("missing", ["distant_mass", "output_norm"])
def test_unmeasured_statistics_are_named(tmp_path: Path, missing: str) -> None:
    stats = masses(NEED, TOKENS)
    del stats[missing]
    with pytest.raises(PlanError, match=f"did not measure {missing}"):
        _plan(*write_scan(tmp_path / "s.duckdb", GRID, stats, TOKENS))


def test_no_distant_mass_at_all_is_no_order(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="heads cannot be ordered"):
        _plan(*write_scan(tmp_path / "s.duckdb", GRID, masses(0 * NEED, TOKENS), TOKENS))
