"""A synthetic scan with known masses, and an evaluation, for plans and reports."""

from __future__ import annotations

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.catalog import PROFILES, STATISTICS
from headscan.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.store.store import Store
from tests.stores import begin_arm, copy_store, sequence_rows

SINK, RECENT = 4, 16


def site(
    layer: int, heads: int, kv_heads: int, window: int | None = None, dim: int = 8, **changes: Any
) -> dict[str, Any]:
    """An attention in bfloat16 whose KV heads cache a key and a value each."""
    return {
        "site": "self",
        "layer": layer,
        "path": f"layers.{layer}",
        "output_projection": f"layers.{layer}.o",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "value_dim": dim,
        "sliding_window": window,
        "kv_shared_from": None,
        "cache_heads": kv_heads,
        "cache_bytes_per_token": kv_heads * 2 * dim * 2,
        "cache_tokens": None if window is None else window - 1,
    } | changes


def unrecorded(a_site: dict[str, Any]) -> dict[str, Any]:
    """The same as runs kept it before they recorded the KV cache."""
    return {key: value for key, value in a_site.items() if not key.startswith(("cache_", "kv_"))}


#: Scans that this process wrote, by their content: a copy takes a tenth of the time of a new one.
_WRITTEN: dict[bytes, tuple[Path, str]] = {}
_FOLDER = TemporaryDirectory(prefix="scans-")


def write_scan(
    path: Path, grid: list[dict[str, Any]], statistics: dict[str, np.ndarray], tokens: list[int], **changes: Any
) -> tuple[Store, str]:
    """A finished scan. ``statistics``: name to (sequences, layers, heads), of profiles with bins behind; the others
    are NaN. ``tokens``: lengths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = pickle.dumps((grid, statistics, tokens, changes))
    if key not in _WRITTEN:
        written = Path(_FOLDER.name) / f"{len(_WRITTEN)}.duckdb"
        _WRITTEN[key] = written, _new_scan(written, grid, statistics, tokens, changes)
    written, run_id = _WRITTEN[key]
    return Store(copy_store(written, path), lock_timeout=5.0), run_id


def _new_scan(
    path: Path,
    grid: list[dict[str, Any]],
    statistics: dict[str, np.ndarray],
    tokens: list[int],
    changes: dict[str, Any],
) -> str:
    store = Store(path, lock_timeout=5.0)
    layers, heads = 1 + max(s["layer"] for s in grid), max(s["num_attention_heads"] for s in grid)
    record = {
        "model_config_hash": "c0ffee",
        "weights_hash": "beef",
        "corpus": "texts",
        "dtype": "bfloat16",
        "attention_path": "sdpa",
        "bos_policy": "add",
        "grid": grid,
        "config": {"sink": SINK, "recent": RECENT},
        "packages": {"torch": "2.13", "transformers": "5.23"},
        "code_version": "0.1.0",
    } | changes
    count = len(tokens)
    keys = [(i, s["layer"], h, h // _group(s)) for i in range(count) for s in grid for h in range(_heads(s))]
    sequence, layer, head, kv_head = (np.array(column) for column in zip(*keys, strict=True))
    table = {"sequence": sequence, "site": ["self"] * len(keys), "layer": layer, "head": head, "kv_head": kv_head}
    table |= {n: statistics[n][sequence, layer, head].astype(np.float32) for n in STATISTICS if n in statistics}
    table |= {n: list(statistics[n][sequence, layer, head].astype(np.float32)) for n in PROFILES if n in statistics}
    with store.one_transaction():
        run_id = store.begin_run(RunRecord("scan", "f0", "tiny", layers, heads, **record)).run_id
        store.add_shards(run_id, [ShardToWrite(ShardRecord(0, "c0"), sequence_rows(tokens), pa.table(table))])
    store.finish_run(run_id, total_shards=1, corpus_hash="c0de")
    return run_id


def masses(need: np.ndarray, tokens: list[int]) -> dict[str, np.ndarray]:
    """Statistics of heads (layers, heads) whose every far-sighted query spends ``need`` (0 to 1) on distant keys.

    Output norms are 1, entropies 2, and what is not distant mass is half sink, half recent.
    """
    lengths = np.array(tokens, dtype=float)[:, None, None]
    distant = need * np.maximum(lengths - SINK - RECENT, 0) / lengths
    return {
        "distant_mass": distant,
        "sink_mass": (1 - distant) / 2,
        "recent_mass": (1 - distant) / 2,
        "output_norm": np.ones_like(distant),
        "entropy": np.full_like(distant, 2.0),
    }


def everything(layers: int, heads: int, tokens: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Plausible numbers for every statistic: (sequences, layers, heads)."""
    rng = np.random.default_rng(seed)
    shape = (len(tokens), layers, heads)
    norms = rng.lognormal(0.0, 0.6, (1, layers, heads)) * rng.lognormal(0.0, 0.1, shape)
    shares = rng.beta(0.6, 1.2, (1, layers, heads)) * rng.uniform(0.9, 1.0, shape)
    return (
        {name: norms if "norm" in name else 4 * (1 - shares) if name == "entropy" else shares for name in STATISTICS}
        | masses(rng.beta(0.5, 3.0, (layers, heads)), tokens)
        | {"output_norm": norms, "entropy": 4 * (1 - shares)}
    )


def evaluation_record(store: Store, fingerprint: str) -> RunRecord:
    """An evaluate run of the model that the newest scan of the store measured; of any model without a scan."""
    scans = store.runs("scan") if store.path.exists() else []
    scan = next(iter(scans), {"model": "tiny"})
    model = {key: scan.get(key) for key in ("model", "model_revision", "model_config_hash", "weights_hash")}
    return RunRecord("evaluate", fingerprint, num_layers=6, num_heads=8, corpus="arithmetic", **model)


def write_evaluation(store: Store, seeds: int = 3, questions: int = 800, prefix: str = "") -> str:
    """An evaluate run of the scanned model: a baseline, two masks, ``seeds`` random controls of each mask's size."""
    record = evaluation_record(store, "e0")
    rng = np.random.default_rng(1)
    baseline = rng.random(questions) < 0.7
    arms = [("baseline", "baseline", 0.0, 0)]
    for share, loss in ((0.05, 1), (0.1, 12)):
        arms += [(f"{prefix}output_norm_ln-{share:.0%}", "mask", share, loss)]
        arms += [(f"{prefix}random-{share:.0%}-{s}", "random_mask", share, 80 + 20 * s) for s in range(seeds)]
    with store.one_transaction():
        run_id = store.begin_run(record).run_id
        for name, kind, zeroed, loss in arms:
            correct = baseline.copy()
            correct[rng.choice(np.flatnonzero(baseline), loss, replace=False)] = False
            arm_id = begin_arm(store, run_id, name, kind)
            table = {"task": ["sums"] * questions, "question": np.arange(questions), "correct": correct.astype(float)}
            store.finish_arm(arm_id, pa.table(table), ablated_share=zeroed)
        store.finish_run(run_id)
    return run_id


def _heads(a_site: dict[str, Any]) -> int:
    return int(a_site["num_attention_heads"])


def _group(a_site: dict[str, Any]) -> int:
    return _heads(a_site) // int(a_site["num_key_value_heads"])
