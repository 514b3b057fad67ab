"""The views' numbers against the same numbers worked out with numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from headscan.catalog import MAX_OFFSET, PROFILES, SCORES, STATISTICS
from headscan.ranking.head_ranking import rank_heads
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import (
    GROUP,
    HEADS,
    LAYERS,
    SEQUENCES,
    Scan,
    head_table,
    make_profiles,
    make_stats,
    scan_record,
    sequence_table,
    write_scan,
)

#: Scores of the paper, whose formulas and directions stand here once more.
PUBLISHED = [score.name for score in SCORES.values() if score.source.startswith("arXiv 2504.03889")]


def _score(stats: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the score of every (sequence, layer, head), without the SQL of views and, if it is published, without its
    declaration.
    """
    if name in SCORES and name not in PUBLISHED:
        statistic, normaliser, over = (getattr(SCORES[name], field) for field in ("statistic", "normaliser", "over"))
        below = np.float64(1) if normaliser is None else stats[normaliser].astype(np.float64)
        return stats[statistic] / (below.mean(axis=2, keepdims=True) if over == "layer" else below)
    if name.endswith("_ln"):
        normaliser = "output_norm" if name == "last_output_norm_ln" else name.removesuffix("_ln")
        mean = stats[normaliser].astype(np.float64).mean(axis=2, keepdims=True)
        return stats[name.removesuffix("_ln")] / mean
    if name == "last_output_norm_hn":
        return stats["last_output_norm"].astype(np.float64) / stats["output_norm"]
    return stats[name].astype(np.float64)


def _grid(scan: Scan, sql: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    table = scan.store.query(sql, [scan.run_id])
    return {c: table[c].to_numpy().astype(np.float64).reshape(shape) for c in table.column_names}


def test_scores_of_each_sequence(scan: Scan) -> None:
    sql = f"SELECT {', '.join(SCORES)} FROM head_scores WHERE run_id = ? ORDER BY sequence, layer, head"
    found = _grid(scan, sql, (SEQUENCES, LAYERS, HEADS))
    for name in SCORES:
        np.testing.assert_allclose(found[name], _score(scan.stats, name), rtol=1e-6, err_msg=name)


def test_summary_means_deviations_and_quantiles(scan: Scan) -> None:
    sql = "SELECT * EXCLUDE (run_id, model, corpus, site) FROM head_summary WHERE run_id = ? ORDER BY layer, head"
    found = _grid(scan, sql, (LAYERS, HEADS))
    assert (found["sequences"] == SEQUENCES).all()
    assert (found["kv_head"] == np.arange(HEADS) // GROUP).all()
    for name in (*SCORES, *(s for s in STATISTICS if s not in SCORES)):
        values = _score(scan.stats, name)
        expected = {
            name: np.nanmean(values, axis=0),
            f"{name}_std": np.nanstd(values, axis=0, ddof=1),
            **{
                f"{name}_{k}": np.nanquantile(values, q, axis=0)
                for k, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
            },
        }
        for column, numbers in expected.items():
            np.testing.assert_allclose(found[column], numbers, rtol=1e-5, err_msg=column)


def test_inactive_share_counts_the_side_the_catalogue_names(scan: Scan) -> None:
    sql = f"SELECT {', '.join(f'{s}_inactive' for s in SCORES)} FROM head_summary WHERE run_id = ? ORDER BY layer, head"
    found = _grid(scan, sql, (LAYERS, HEADS))
    for name in SCORES:
        values = _score(scan.stats, name)
        published = "high" if name in ("first_token_weight", "first_token_weight_ln") else "low"
        if (published if name in PUBLISHED else SCORES[name].inactive) == "high":
            beyond = values > np.quantile(values, 0.9)
        else:
            beyond = values < np.quantile(values, 0.1)
        np.testing.assert_allclose(found[f"{name}_inactive"], beyond.mean(axis=0), err_msg=name)
        assert beyond.any()


def test_a_head_at_the_limit_is_not_beyond_it(scan: Scan) -> None:
    stats = {"output_norm": np.ones((10, LAYERS, HEADS), np.float32)}
    stats["output_norm"][:2, 0, 0] = 0.5
    other = write_scan(scan.store.path, stats, "ties")
    sql = "SELECT output_norm_inactive FROM head_summary WHERE run_id = ? ORDER BY layer, head"
    found = scan.store.query(sql, [other.run_id])["output_norm_inactive"].to_pylist()
    assert found == [0.2] + [0.0] * (LAYERS * HEADS - 1)


def test_runs_do_not_mix(scan: Scan) -> None:
    def summary() -> object:
        return scan.store.query("FROM head_summary WHERE run_id = ? ORDER BY layer, head", [scan.run_id])

    before = summary()
    other = write_scan(scan.store.path, {k: 1000 * v for k, v in make_stats(1, 5).items()}, "other")
    assert other.run_id != scan.run_id
    assert summary() == before
    counts = scan.store.query("SELECT DISTINCT sequences FROM head_summary WHERE run_id = ?", [other.run_id])
    assert counts.to_pylist() == [{"sequences": 5}]


def test_unmeasured_values_and_zero_denominators_are_null(scan: Scan) -> None:
    stats = {k: v for k, v in make_stats(2, 4).items() if k in ("output_norm", "entropy")}
    stats["entropy"][:, 0] = 0.0
    stats["output_norm"][0, 1, 1] = np.inf
    other = write_scan(scan.store.path, stats, "partial")
    rows = scan.store.query(
        "SELECT entropy_ln, value_norm, value_norm_inactive, output_norm FROM head_summary WHERE run_id = ?"
        " ORDER BY layer, head",
        [other.run_id],
    ).to_pylist()
    assert all(row["value_norm"] is None and row["value_norm_inactive"] is None for row in rows)
    assert [row["entropy_ln"] is None for row in rows] == [True] * HEADS + [False] * HEADS * (LAYERS - 1)
    assert rows[HEADS + 1]["output_norm"] == pytest.approx(float(stats["output_norm"][1:, 1, 1].mean()))


def test_profiles_are_averaged_bin_by_bin(scan: Scan) -> None:
    profiles = make_profiles(0, 5)
    profiles["argmax_offsets"][2, 1, 1, 0] = np.nan
    other = write_scan(scan.store.path, profiles, "profiles", shard_size=2)
    sql = "SELECT * FROM head_profiles WHERE run_id = ? AND profile = ? ORDER BY layer, head, bin"
    for name, values in profiles.items():
        table = scan.store.query(sql, [other.run_id, name])
        bins = PROFILES[name].bins
        assert table["label"].to_pylist() == list(bins) * (LAYERS * HEADS)
        assert table["bin"].to_pylist() == list(range(len(bins))) * (LAYERS * HEADS)
        kept = np.where(np.isfinite(values).all(-1, keepdims=True), values, np.nan)
        expected = np.nanmean(kept.astype(np.float64), axis=0)
        np.testing.assert_allclose(table["share"].to_numpy().reshape(expected.shape), expected, rtol=1e-6)
        assert table["kv_head"].to_pylist() == [h // GROUP for h in range(HEADS) for _ in bins] * LAYERS
    assert scan.store.query("FROM head_profiles WHERE run_id = ?", [scan.run_id]).num_rows == 0


def test_a_head_is_positional_from_nine_tenths_at_one_exact_offset(scan: Scan) -> None:
    offsets = np.zeros((2, LAYERS, HEADS, len(PROFILES["argmax_offsets"].bins)), np.float32)

    def look(layer: int, head: int, offset: int, *shares: float) -> None:
        """The shares of the sequences' queries at an offset; the others look far back."""
        offsets[:, layer, head] = 0
        offsets[:, layer, head, 0] = 1 - np.array(shares)
        offsets[:, layer, head, offset + MAX_OFFSET + 1] += np.array(shares, np.float32)

    look(0, 0, -1, 0.9, 0.9)
    look(0, 1, 0, 1.0, 0.82)
    look(0, 2, MAX_OFFSET, 1.0, 1.0)
    look(1, 0, -1, 0.89, 0.9)
    look(1, 1, -MAX_OFFSET - 1, 1.0, 1.0)  # farther than the histogram tells apart: no single offset
    look(1, 2, MAX_OFFSET + 1, 1.0, 1.0)
    other = write_scan(scan.store.path, {"argmax_offsets": offsets}, "positional")
    found = scan.store.query("FROM positional_heads WHERE run_id = ? ORDER BY layer, head", [other.run_id]).to_pylist()
    assert [(r["layer"], r["head"], r["kv_head"], r["key_offset"]) for r in found] == [
        (0, 0, 0, -1),
        (0, 1, 0, 0),
        (0, 2, 1, MAX_OFFSET),
    ]
    assert [r["share"] for r in found] == pytest.approx([0.9, 0.91, 1.0])


def test_sites_of_a_layer_do_not_mix(scan: Scan) -> None:
    """Each view gives the rows of a site as in a run of that site alone."""
    stats = {site: make_stats(seed, 4) | make_profiles(seed, 4) for seed, site in enumerate(("self", "cross"))}
    for of_site in stats.values():
        of_site["argmax_offsets"][:, 0, 0] = np.eye(2 * MAX_OFFSET + 3, dtype=np.float32)[MAX_OFFSET]
    both = scan.store.begin_run(scan_record("both")).run_id
    tables = [head_table(values, 0, 4, site) for site, values in stats.items()]
    scan.store.add_shards(both, [ShardToWrite(ShardRecord(0, "c"), sequence_table(0, 4), pa.concat_tables(tables))])
    scan.store.finish_run(both)
    for site, values in stats.items():
        alone = write_scan(scan.store.path, values, site).run_id
        for view in ("head_scores", "head_summary", "head_profiles", "positional_heads"):
            sql = f"SELECT * EXCLUDE (run_id, site) FROM {view} WHERE run_id = ? AND site = ? ORDER BY ALL"
            rows = scan.store.query(sql, [both, site])
            assert rows.num_rows > 0
            assert rows == scan.store.query(sql, [alone, "self"]), view


def test_arms_are_summed_up_and_compared_in_pairs(evaluate: Callable[..., tuple[Store, str]]) -> None:
    tasks = np.array(["a"] * 4 + ["b"] * 6)
    baseline = np.array([1, 1, 1, 0, 1, 1, 1, 0, 0, 0])
    arm = np.array([1, 0, 0, 1, 1, 1, 1, 1, 0, 0])
    fields = {"criterion": "entropy", "share": 0.1, "seed": 3}
    store, run_id = evaluate(tasks, {"baseline": ("baseline", baseline, 0.0, {}), "ten": ("mask", arm, 0.12, fields)})
    summary = store.query("FROM arm_summary WHERE run_id = ? ORDER BY arm, task", [run_id]).to_pylist()
    assert [(r["arm"], r["task"], r["questions"]) for r in summary] == [
        (name, task, n) for name in ("baseline", "ten") for task, n in (("(all)", 10), ("a", 4), ("b", 6))
    ]
    assert summary[3]["accuracy"] == pytest.approx(0.6)
    assert summary[3]["standard_error"] == pytest.approx(np.sqrt(0.6 * 0.4 / 9))
    record_verdicts(store, run_id)
    compared = store.query("FROM arm_comparison WHERE run_id = ? ORDER BY task", [run_id]).to_pylist()
    columns = ("arm", "criterion", "share", "seed", "ablated_share", "task", "questions", "gained", "lost")
    assert [tuple(r[c] for c in columns) for r in compared] == [
        ("ten", "entropy", 0.1, 3, 0.12, "(all)", 10, 2, 2),
        ("ten", "entropy", 0.1, 3, 0.12, "a", 4, 1, 2),
        ("ten", "entropy", 0.1, 3, 0.12, "b", 6, 1, 0),
    ]
    assert [r["difference"] for r in compared] == pytest.approx([0.0, -0.25, 1 / 6])
    assert [r["baseline"] for r in compared] == pytest.approx([0.6, 0.75, 0.5])
    assert all(r["low"] <= r["difference"] <= r["high"] for r in compared)


def test_recall_and_perplexity_stay_out_of_the_benchmark(evaluate: Callable[..., tuple[Store, str]]) -> None:
    tasks = np.array(["a"] * 4 + ["copying@64"] * 2 + ["needle@512"] * 3 + ["needle@1024"] + ["wikitext"] * 2)
    baseline = np.array([1, 1, 0, 0, 0.5, 0.7, 1, 1, 1, 0, np.nan, np.nan])
    arm = np.array([1, 0, 0, 0, 0.5, 0.1, 0, 0, 1, 0, np.nan, np.nan])
    store, run_id = evaluate(tasks, {"baseline": ("baseline", baseline, 0.0, {}), "ten": ("mask", arm, 0.1, {})})
    record_verdicts(store, run_id)
    expected = [
        ("(all)", False, 4, 0.25),
        ("a", False, 4, 0.25),
        ("copying", True, 2, 0.3),
        ("copying@64", True, 2, 0.3),
        ("needle", True, 4, 0.25),
        ("needle@1024", True, 1, 0.0),
        ("needle@512", True, 3, 1 / 3),
    ]
    for view in ("arm_summary", "arm_comparison"):
        sql = f"SELECT task, recall, questions, accuracy FROM {view} WHERE arm = 'ten' ORDER BY task"
        rows = [tuple(row.values()) for row in store.query(sql).to_pylist()]
        assert [row[:3] for row in rows] == [row[:3] for row in expected], view
        assert [row[3] for row in rows] == pytest.approx([row[3] for row in expected])


def test_summaries_show_finished_runs_and_all_of_them_by_another_name(
    scan: Scan, evaluate: Callable[..., tuple[Store, str]]
) -> None:
    """Rows of a run that was stopped do not mix into a query that names no run."""
    stats = make_stats(1, 4) | make_profiles(1, 4)
    runs = {"finished": scan.run_id}
    for status in ("running", "failed"):
        runs[status] = run_id = scan.store.begin_run(scan_record(status)).run_id
        scan.store.add_shards(
            run_id, [ShardToWrite(ShardRecord(0, "c"), sequence_table(0, 4), head_table(stats, 0, 4))]
        )
    scan.store.finish_run(runs["failed"], status="failed")

    def shown(store: Store, view: str) -> set[str]:
        return set(store.query(f"SELECT DISTINCT run_id FROM {view}")["run_id"].to_pylist())

    assert shown(scan.store, "head_summary") == {runs["finished"]}
    assert shown(scan.store, "all_head_summary") == set(runs.values())
    assert shown(scan.store, "head_profiles") == set()
    assert shown(scan.store, "all_head_profiles") == {runs["running"], runs["failed"]}
    assert rank_heads(scan.store, runs["running"], "output_norm_ln"), "who names a run gets it"

    kind = {
        "base": ("baseline", np.ones(8), 0.0, {}),
        "some": ("mask", np.ones(8), 0.1, {"criterion": "entropy", "share": 0.1}),
    }
    store, run_id = evaluate(np.array(["t"] * 8), kind)
    record_verdicts(store, run_id)
    summaries = ("arm_summary", "arm_comparison", "sweep_points", "score_curves")
    assert [shown(store, view) for view in summaries] == [{run_id}] * 4
    with store.connect() as connection:
        connection.execute("UPDATE runs SET status = 'running'")
    assert [shown(store, view) for view in summaries] == [set()] * 4
    assert [shown(store, f"all_{view}") for view in summaries] == [{run_id}] * 4
