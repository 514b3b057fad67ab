"""Small synthetic runs: a scan whose numbers are known as arrays, and an evaluation with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.catalog import PROFILES, STATISTICS
from headscan.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.verdicts import paired
from tests.stores import begin_arm, copy_store


def compare(
    baseline: np.ndarray, arm: np.ndarray, strata: np.ndarray | None = None, texts: np.ndarray | None = None
) -> paired.PairedDifference:
    """Compare answers to questions of tasks (strata) and texts."""
    return paired.paired_difference(baseline, arm, paired.QuestionClusters(len(arm), strata, texts))


SEQUENCES, LAYERS, HEADS, GROUP = 23, 3, 4, 2


@dataclass(frozen=True)
class Scan:
    """A store with one scan. ``stats``: name to float32 (sequences, layers, heads), NaN where not measured; of a
    profile (sequences, layers, heads, bins)."""

    store: Store
    run_id: str
    stats: dict[str, np.ndarray]


def make_stats(seed: int = 0, sequences: int = SEQUENCES) -> dict[str, np.ndarray]:
    """Random numbers whose layers and sequences differ a lot, so that a mean of ratios is far from a ratio of means."""
    rng = np.random.default_rng(seed)
    shape = (sequences, LAYERS, HEADS)
    return {
        name: (rng.lognormal(size=shape) * rng.lognormal(size=(sequences, LAYERS, 1))).astype(np.float32)
        for name in STATISTICS
    }


def sequence_table(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "sequence": numbers,
            "document": numbers,
            "source": ["text"] * count,
            "tokens": [10 + n for n in numbers],
            "truncated": [n % 2 == 0 for n in numbers],
            "content_hash": [f"h{n}" for n in numbers],
        }
    )


def make_profiles(seed: int = 0, sequences: int = SEQUENCES) -> dict[str, np.ndarray]:
    """Random profiles whose bins sum to one."""
    rng = np.random.default_rng(seed)
    shape = (sequences, LAYERS, HEADS)
    return {p.name: rng.dirichlet(np.ones(len(p.bins)), shape).astype(np.float32) for p in PROFILES.values()}


def head_table(stats: dict[str, np.ndarray], first: int, count: int, site: str = "self") -> pa.Table:
    """The rows of sequences ``first`` to ``first + count``, all layers and heads."""
    s, layer, head = (a.ravel() for a in np.meshgrid(range(count), range(LAYERS), range(HEADS), indexing="ij"))
    keys = {"sequence": s + first, "site": [site] * len(s), "layer": layer, "head": head, "kv_head": head // GROUP}
    return pa.table(keys | {name: _column(values[first : first + count]) for name, values in stats.items()})


def _column(values: np.ndarray) -> np.ndarray | list[np.ndarray]:
    return values.ravel() if values.ndim == 3 else list(values.reshape(-1, values.shape[-1]))


def scan_record(fingerprint: str = "f0", **changes: object) -> RunRecord:
    return RunRecord("scan", fingerprint, "tiny", LAYERS, HEADS, corpus="texts", **changes)  # type: ignore[arg-type]


def write_scan(path: Path, stats: dict[str, np.ndarray], fingerprint: str = "f0", shard_size: int = 15) -> Scan:
    store = Store(path, lock_timeout=5.0)
    total = len(next(iter(stats.values())))
    with store.one_transaction():
        run_id = store.begin_run(scan_record(fingerprint)).run_id
        for shard, first in enumerate(range(0, total, shard_size)):
            count = min(shard_size, total - first)
            record, sequences = ShardRecord(shard, f"c{shard}", 0.5, "worker"), sequence_table(first, count)
            store.add_shards(run_id, [ShardToWrite(record, sequences, head_table(stats, first, count))])
    store.finish_run(run_id, report={"empty": 1}, total_shards=shard + 1, corpus_hash="corpus")
    return Scan(store, run_id, stats)


@pytest.fixture(scope="session")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    stats = make_stats()
    stats["relative_entropy"][4, 1, 2] = np.nan
    return write_scan(tmp_path_factory.mktemp("scan") / "scan.duckdb", stats)


@pytest.fixture
def scan(_written: Scan, tmp_path: Path) -> Scan:
    """A scan of its own for each test, in two shards."""
    path = copy_store(_written.store.path, tmp_path / "scan.duckdb")
    return Scan(Store(path, lock_timeout=5.0), _written.run_id, _written.stats)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without rows; a copy takes less time than a new one."""
    path = tmp_path_factory.mktemp("store") / "empty.duckdb"
    with Store(path).connect(create=True):
        pass
    return path


@pytest.fixture
def evaluate(tmp_path: Path, empty_store: Path) -> Callable[..., tuple[Store, str]]:
    """Write an evaluate run: ``evaluate(tasks, {name: (kind, correct, ablated_share, further fields of the arm)})``.

    ``groups`` are the groups of tasks that were asked for; a run with others is another run.
    """

    def write(
        tasks: np.ndarray,
        arms: dict[str, tuple[str, np.ndarray, float | None, dict]],
        groups: dict[str, list[str]] | None = None,
    ) -> tuple[Store, str]:
        store = Store(tmp_path / "evaluation.duckdb", lock_timeout=5.0)
        if not store.path.exists():
            copy_store(empty_store, store.path)
        config = {"groups": groups} if groups else {}
        # One opening of the file for all arms: the store's own methods open it for each.
        with store.one_transaction():
            record = RunRecord("evaluate", f"e{config}", "tiny", LAYERS, HEADS, config=config)
            run_id = store.begin_run(record).run_id
            for name, (kind, correct, ablated_share, fields) in arms.items():
                arm_id = begin_arm(store, run_id, name, kind, **fields)
                answers = answer_table(tasks[: len(correct)], correct)
                store.finish_arm(arm_id, answers, ablated_share=ablated_share)
            store.finish_run(run_id)
        return store, run_id

    return write


def answer_table(tasks: np.ndarray, correct: np.ndarray) -> pa.Table:
    """Answers to one question after another; NaN where nothing is right. Tasks like needle@512 test recall."""
    values = np.asarray(correct, dtype=np.float64)
    return pa.table(
        {
            "task": tasks,
            "question": np.arange(len(tasks)),
            "recall": ["@" in task for task in tasks],
            "doc_hash": [f"d{i % 4}" for i in range(len(tasks))],
            "target": ["A"] * len(tasks),
            "response": ["B"] * len(tasks),
            "correct": pa.array(values, mask=np.isnan(values)),
            "log_likelihoods": [[-1.0, -2.0]] * len(tasks),
            "metrics": ['{"acc": 1}'] * len(tasks),
        }
    )
