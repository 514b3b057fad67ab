"""Every stored number of a scan against the definition on all rows, and what keeps the stored numbers true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.catalog import SCORES
from headscan.cli.main import main
from headscan.plans.scan_scores import measure_query_heads
from headscan.ranking.comparisons import score_overlap
from headscan.ranking.head_ranking import thresholds
from headscan.store import head_spread, site_rows, summaries
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.scan_tables import HEAD_BINS, MOSTLY, POOL_BINS, SPAN, THRESHOLDS
from headscan.store.store import Store
from headscan.store.views import SUMMARISED, VIEWS
from tests.numbers.conftest import (
    HEADS,
    LAYERS,
    Scan,
    head_table,
    make_profiles,
    make_stats,
    scan_record,
    sequence_table,
)
from tests.small_models import slow
from tests.stores import copy_store

SEQUENCES, BOUNDED = 40, 30  # sequence n has 10 + n tokens, so 19 are longer than sink and recent together


def shards(stats: dict[str, np.ndarray]) -> list[ShardToWrite]:
    """Two shards with different numbers of sequences."""
    return [
        ShardToWrite(ShardRecord(i, f"c{i}"), sequence_table(first, count), head_table(stats, first, count))
        for i, (first, count) in enumerate(((0, 25), (25, 15)))
    ]


@pytest.fixture(scope="module")
def _hard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An unfinished scan of both panels with unmeasured values, a head without any, ties and a zero denominator."""
    stats = make_stats(3, SEQUENCES) | make_profiles(3, SEQUENCES)
    rng = np.random.default_rng(4)
    for name in ("entropy", "output_norm", "distant_mass", "argmax_offsets"):
        stats[name][rng.random((SEQUENCES, LAYERS, HEADS)) < 0.2] = np.nan
    stats["output_norm"][:, 2, 3] = np.nan
    stats["value_norm"] = np.round(stats["value_norm"])  # ties, and layers whose mean is zero in a sequence
    stats["value_norm"][7, 1] = 0
    stats["self_weight"][:] = 0.25
    stats.pop("sink_mass")
    store = Store(tmp_path_factory.mktemp("hard") / "s.duckdb")
    with store.one_transaction():
        run_id = store.begin_run(scan_record("hard", config={"sink": 4, "recent": BOUNDED - 4})).run_id
        store.add_shards(run_id, reversed(shards(stats)))
    return store.path, run_id


@pytest.fixture
def hard(_hard: tuple[Path, str], tmp_path: Path) -> tuple[Store, str]:
    """The same scan in a store of its own."""
    path, run_id = _hard
    return Store(copy_store(path, tmp_path / "s.duckdb"), lock_timeout=5.0), run_id


def rows_of(store: Store, view: str, run_id: str) -> pa.Table:
    return store.query(f"FROM {view} WHERE run_id = ? ORDER BY ALL", [run_id])


def same(a: pa.Table, b: pa.Table) -> None:
    """Equal in every column; doubles to the last bits, in which sums in another order differ."""
    assert a.schema == b.schema and a.num_rows == b.num_rows > 0
    for name in a.column_names:
        if a.schema.field(name).type == pa.float64():
            close(a[name], b[name], name)
        else:
            assert a[name].to_pylist() == b[name].to_pylist(), name


def close(a: pa.ChunkedArray, b: pa.ChunkedArray, name: str, rel: float = 1e-13) -> None:
    np.testing.assert_allclose(*(column.to_numpy().astype(float) for column in (a, b)), rtol=rel, err_msg=name)


@pytest.mark.parametrize("in_parts", [False, True])
def test_every_stored_number_equals_the_view_on_all_rows(
    hard: tuple[Store, str], monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    """Also if a layer alone fits in memory, a sample is not the pool, and quantiles are looked up in bins."""
    store, run_id = hard
    if in_parts:
        for name, value in (("_MOST_VALUES", 1), ("_BATCH", 7), ("_TASK_VALUES", 1)):
            monkeypatch.setattr(site_rows, name, value)
        for name, value in (("_SAMPLE", 16), ("_SORTED", 0)):
            monkeypatch.setattr(head_spread, name, value)
    views = ("all_head_summary", "all_head_profiles", "all_positional_heads", "all_head_roles")
    before = {view: rows_of(store, view, run_id) for view in views if view != "all_positional_heads"}
    store.finish_run(run_id)
    assert store.query("SELECT DISTINCT run_id FROM head_summaries")["run_id"].to_pylist() == [run_id]
    for view, table in before.items():
        same(rows_of(store, view, run_id), table)
    finished = store.query("FROM head_summary ORDER BY layer, head")
    assert finished.num_rows == LAYERS * HEADS and finished == store.query("FROM all_head_summary ORDER BY layer, head")
    exact = [f"{name}_{q}" for name in SUMMARISED for q in ("p10", "median", "p90")]
    exact += [f"{name}_inactive" for name in SCORES]
    computed = before["all_head_summary"].sort_by([("layer", "ascending"), ("head", "ascending")])
    for name in exact:  # sums have no part in these
        close(finished[name], computed[name], name, 0 if finished[name].type == pa.float32() else 3e-16)


def test_the_order_of_the_rows_changes_no_number(hard: tuple[Store, str]) -> None:
    """A column is read as stored only if the rows of each sequence are in order."""
    store, run_id = hard
    tables = ("head_summaries", "measure_pools")
    store.finish_run(run_id)
    before = [rows_of(store, table, run_id) for table in tables]
    with store.connect() as connection:
        connection.execute("CREATE TABLE shuffled AS FROM head_statistics ORDER BY hash(sequence, layer, head)")
        for table in ("head_statistics", *tables):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO head_statistics FROM shuffled; DROP TABLE shuffled")
    store.summarise(run_id)
    for table, rows in zip(tables, before, strict=True):
        same(rows_of(store, table, run_id), rows)


def values_of(store: Store, run_id: str) -> dict[str, np.ndarray]:
    """Return every measure (H, S) as SQL gives it, NaN for NULL."""
    rows = store.query(
        "SELECT c.*, h.* EXCLUDE (run_id, sequence, site, layer, head, kv_head) FROM head_statistics h JOIN"
        f" (SELECT run_id, sequence, site, layer, head, COLUMNS(lambda c: c NOT IN ({', '.join(map(repr, _SHARED))})"
        " AND c NOT IN ('run_id', 'sequence', 'site', 'layer', 'head', 'kv_head')) FROM head_scores) c"
        " USING (run_id, sequence, site, layer, head) WHERE run_id = ? ORDER BY layer, head, sequence",
        [run_id],
    )
    names = [name for name in SUMMARISED if name in rows.column_names]
    return {name: rows[name].to_numpy().astype(np.float64).reshape(LAYERS * HEADS, SEQUENCES) for name in names}


#: Scores that are statistics of the same name.
_SHARED = [name for name, score in SCORES.items() if score.normaliser is None]


def test_every_number_of_the_pools_equals_plain_numpy(hard: tuple[Store, str]) -> None:
    store, run_id = hard
    store.finish_run(run_id)
    values = values_of(store, run_id)
    pools = {row["measure"]: row for row in store.query("FROM measure_pools").to_pylist()}
    assert set(pools) == {name for name in SUMMARISED if np.isfinite(values[name]).any()} and "sink_mass" not in pools
    histograms = store.query(
        "SELECT measure, histogram, measured FROM head_summaries ORDER BY measure, layer, head"
    ).to_pylist()
    for name, pool in pools.items():
        flat = values[name][np.isfinite(values[name])]
        low, high = np.quantile(flat, SPAN)
        if low == high:
            low, high = low - 0.5, high + 0.5
        assert (pool["low"], pool["high"]) == pytest.approx((low, high), rel=1e-13)
        bins = np.clip((flat - pool["low"]) * (POOL_BINS / (pool["high"] - pool["low"])), 0, POOL_BINS - 1)
        assert pool["histogram"] == np.bincount(bins.astype(int), minlength=POOL_BINS).tolist()
        own = [row for row in histograms if row["measure"] == name]
        for row, of_head in zip(own, values[name], strict=True):
            assert row["measured"] == sum(row["histogram"]) == np.isfinite(of_head).sum()
            assert len(row["histogram"]) == HEAD_BINS
        whole = np.sum([row["histogram"] for row in own], axis=0)
        assert whole.tolist() == np.reshape(pool["histogram"], (HEAD_BINS, -1)).sum(axis=1).tolist()
        if name not in SCORES:
            assert pool["thresholds"] is pool["picks"] is pool["inactive_heads"] is None
            continue
        sign = 1 if SCORES[name].inactive == "low" else -1
        expected = [sign * np.quantile(sign * flat, share) for share in THRESHOLDS]
        assert [share for share, _ in pool["thresholds"]] == list(THRESHOLDS)
        assert [value for _, value in pool["thresholds"]] == pytest.approx(expected, rel=1e-13)
        inactive = store.query(f"SELECT count_if({name}_inactive >= {MOSTLY}) AS n FROM head_summary").to_pylist()[0][
            "n"
        ]
        assert pool["inactive_heads_low"] <= pool["inactive_heads"] == inactive <= pool["inactive_heads_high"]
    pairs = {(row["score_a"], row["score_b"]): row for row in score_overlap(store, run_id, 0.1).to_pylist()}
    for (a, b), row in pairs.items():
        picks = dict(pools[a]["picks"])
        assert (picks[a], dict(pools[b]["picks"])[b], picks[b]) == (row["picked_a"], row["picked_b"], row["both"])
    assert pairs


def test_thresholds_of_rules_are_stored_or_computed_alike(hard: tuple[Store, str]) -> None:
    store, run_id = hard
    shares = (*THRESHOLDS, 0.33)
    with store.reading():
        expected = {
            score: [
                store.query(
                    f"SELECT quantile_cont({score}::DOUBLE, {q if SCORES[score].inactive == 'low' else 1 - q}) AS x"
                    " FROM head_scores"
                )["x"][0].as_py()
                for q in shares
            ]
            for score in SCORES
        }
        for score in SCORES:
            assert thresholds(store, run_id, score, shares) == pytest.approx(expected[score], rel=1e-13)
    store.finish_run(run_id)
    with store.reading():
        for score in SCORES:
            assert thresholds(store, run_id, score, shares) == pytest.approx(expected[score], rel=1e-13)
            assert thresholds(store, run_id, score, THRESHOLDS) == pytest.approx(expected[score][:-1], rel=1e-13)


def test_evidence_of_plans_is_the_mean_over_long_sequences(hard: tuple[Store, str]) -> None:
    store, run_id = hard
    rows = store.query(
        "SELECT h.layer, h.head, avg(h.recent_mass) AS recent_mass, avg(h.distant_mass) AS distant_mass,"
        " avg(c.output_norm_ln) AS output_norm_ln, sum(s.tokens * h.distant_mass::DOUBLE)"
        " / sum(s.tokens - $2) FILTER (h.distant_mass IS NOT NULL) AS far_mass FROM head_statistics h"
        " JOIN sequences s USING (run_id, sequence) JOIN head_scores c USING (run_id, sequence, site, layer, head)"
        " WHERE run_id = $1 AND s.tokens > $2 GROUP BY ALL ORDER BY ALL",
        [run_id, BOUNDED],
    ).to_pylist()
    unfinished = measure_query_heads(store, run_id)
    store.finish_run(run_id)
    assert measure_query_heads(store, run_id) == unfinished
    for row, head in zip(rows, unfinished, strict=True):
        assert (head.layer, head.head, head.sink_mass) == (row["layer"], row["head"], None)
        row["far_mass"] = min(1.0, row["far_mass"])
        for name in ("recent_mass", "distant_mass", "output_norm_ln", "far_mass"):
            assert getattr(head, name) == (None if row[name] is None else pytest.approx(row[name], rel=1e-12)), name


def test_further_shards_replace_the_summary(hard: tuple[Store, str]) -> None:
    store, run_id = hard
    store.finish_run(run_id)
    first = rows_of(store, "all_head_summary", run_id)
    more = ShardToWrite(ShardRecord(2, "c2"), sequence_table(SEQUENCES, 5), head_table(make_stats(9, 5), 0, 5))
    heads = more.heads.set_column(0, "sequence", pa.array(np.repeat(np.arange(5), LAYERS * HEADS) + SEQUENCES))
    store.add_shards(run_id, [more._replace(heads=heads)])
    assert store.query("FROM head_summaries").num_rows == store.query("FROM measure_pools").num_rows == 0
    computed = rows_of(store, "all_head_summary", run_id)
    assert computed["sequences"].to_pylist() == [SEQUENCES + 5] * (LAYERS * HEADS) != first["sequences"].to_pylist()
    store.finish_run(run_id)
    same(rows_of(store, "all_head_summary", run_id), computed)


def test_a_summary_of_fewer_shards_is_not_stored(hard: tuple[Store, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process adds a shard while the summary is computed."""
    store, run_id = hard
    compute: Callable[..., summaries.SummaryRows] = summaries.summarise_run
    late: list[ShardToWrite] = [
        ShardToWrite(ShardRecord(7, "c7"), sequence_table(90, 1), head_table(make_stats(1, 91), 90, 1))
    ]
    found = store._new_summary(run_id)
    assert found is not None and compute is not None
    store.add_shards(run_id, late)
    monkeypatch.setattr(store, "_new_summary", lambda _: found)
    store.finish_run(run_id)
    assert store.query("FROM head_summaries").num_rows == 0
    assert set(store.query("SELECT sequences FROM head_summary")["sequences"].to_pylist()) == {SEQUENCES + 1}


@pytest.mark.parametrize("verbs", [("rank --json", "roles --json"), *slow((("report --out {folder}/r.html",),))])
def test_commands_answer_alike_from_a_store_without_summaries(
    scan: Scan, tmp_path: Path, capsys: pytest.CaptureFixture[str], verbs: tuple[str, ...]
) -> None:
    """As after a new score; scanning again (`Store.summarise`) stores what is missing."""

    def answers() -> list[str]:
        found = []
        for verb in verbs:
            assert main([*verb.format(folder=tmp_path).split(), "--store", str(scan.store.path)]) == 0
            found.append(capsys.readouterr().out)
        return [*found, *(path.read_text() for path in tmp_path.glob("*.html"))]

    stored = answers()
    with scan.store.connect() as connection:
        for table in ("head_summaries", "measure_pools"):
            connection.execute(f"DELETE FROM {table}")
    assert answers()[len(verbs) - 1] == stored[len(verbs) - 1]  # means of a ranking differ in their last digits
    scan.store.summarise(scan.run_id)
    assert scan.store.query("FROM measure_pools").num_rows == len(SUMMARISED)
    assert answers() == stored


def test_finished_runs_are_answered_without_a_look_at_their_rows(scan: Scan) -> None:
    expected = {view: rows_of(scan.store, view, scan.run_id) for view in ("head_summary", "head_roles")}
    with scan.store.connect() as connection:
        connection.execute("UPDATE head_statistics SET entropy = 0, output_norm = 0")
    for view, rows in expected.items():
        assert view in VIEWS and rows_of(scan.store, view, scan.run_id) == rows
