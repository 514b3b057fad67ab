"""A synthetic store of any size: scans, probe, importance and evaluation, with hostile names if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.catalog import BEHAVIOURS, PROFILES, STATISTICS
from headscan.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.store.store import Store
from tests.numbers.plan_fixtures import site
from tests.stores import sequence_rows, write_behaviours

_MODEL = {"model_config_hash": "c0ffee", "weights_hash": "beef"}


def write_large_scan(
    store: Store,
    layers: int,
    heads: int,
    sequences: int,
    *,
    fingerprint: str = "large",
    seed: int = 0,
    per_shard: int = 25,
    profiles: bool = False,
    model: str = "imagined",
    corpus: str = "texts",
    source: str = "text",
) -> str:
    """A finished scan: heads differ most, then sequences; deep layers have larger norms and more sink."""
    rng = np.random.default_rng(seed)
    grid = [site(layer, heads, max(1, heads // 8)) for layer in range(layers)]
    record: dict[str, Any] = {"corpus": corpus, "dtype": "bfloat16", "attention_path": "interface", "grid": grid}
    record |= {"bos_policy": "auto", "packages": {"torch": "2.13"}, "code_version": "0.1.0"}
    config = {"sink": 4, "recent": 256}
    run = RunRecord("scan", fingerprint, model, layers, heads, config=config, **record, **_MODEL)
    run_id = store.begin_run(run).run_id
    strength = rng.beta(0.6, 1.2, (layers, heads))
    size = rng.lognormal(0.0, 0.7, (layers, heads)) * np.linspace(0.5, 3, layers)[:, None]
    layer, head = (axis.ravel() for axis in np.meshgrid(range(layers), range(heads), indexing="ij"))
    shards = []
    for shard, first in enumerate(range(0, sequences, per_shard)):
        count = min(per_shard, sequences - first)
        numbers = np.arange(first, first + count)
        table: dict[str, Any] = {
            "sequence": np.repeat(numbers, layers * heads),
            "site": pa.DictionaryArray.from_arrays(pa.array([0] * count * layers * heads, pa.int8()), ["self"]).cast(
                pa.string()
            ),
            "layer": np.tile(layer, count),
            "head": np.tile(head, count),
            "kv_head": np.tile(head // 8, count),
        }
        for name, statistic in STATISTICS.items():
            noise = rng.normal(1, 0.15, (count, layers, heads))
            base = size if "norm" in name else 6 * (1 - strength) if statistic.unit == "nats" else strength
            values = np.abs(base * noise)
            table[name] = (np.minimum(values, 1) if statistic.unit == "share" else values).astype(np.float32).ravel()
        if profiles:
            for profile in PROFILES.values():
                drawn = rng.dirichlet(np.full(len(profile.bins), 0.2), (layers, heads)).astype(np.float32)
                table[profile.name] = list(drawn.reshape(-1, len(profile.bins))) * count
        rows = sequence_rows([1024] * count, first, source)
        shards.append(ShardToWrite(ShardRecord(shard, f"c{shard}"), rows, pa.table(table)))
        if len(shards) == 4:
            store.add_shards(run_id, shards)
            shards = []
    store.add_shards(run_id, shards)
    store.finish_run(run_id, total_shards=shard + 1, corpus_hash="c0de")
    return run_id


def write_probe(store: Store, layers: int, heads: int, *, model: str = "imagined", seed: int = 1) -> str:
    """A finished probe of every behaviour; a few heads show each."""
    rng = np.random.default_rng(seed)
    values = {name: rng.beta(0.3, 3, (layers, heads)) for name in BEHAVIOURS}
    return write_behaviours(store, values, f"p{seed}", model, **_MODEL)


def write_importance(store: Store, layers: int, heads: int, sequences: int = 4, *, model: str = "imagined") -> str:
    """A finished importance run."""
    rng = np.random.default_rng(2)
    run_id = store.begin_run(RunRecord("importance", "i0", model, layers, heads, corpus="texts", **_MODEL)).run_id  # type: ignore[arg-type]
    keys = [(s, layer, head) for s in range(sequences) for layer in range(layers) for head in range(heads)]
    sequence, layer, head = (np.array(column) for column in zip(*keys, strict=True))
    table = {
        "sequence": sequence,
        "site": ["self"] * len(keys),
        "layer": layer,
        "head": head,
        "kv_head": head // 8,
        "gate_gradient": (rng.normal(0, 1, len(keys)) * (1 + head)).astype(np.float32),
        "token_gradient": (rng.gamma(9, 1, len(keys)) * (1 + head)).astype(np.float32),
        "entropy": rng.uniform(0, 5, len(keys)).astype(np.float32),
    }
    rows = sequence_rows([100] * sequences)
    store.add_shards(run_id, [ShardToWrite(ShardRecord(0, "c0"), rows, pa.table(table))])
    store.finish_run(run_id, total_shards=1, corpus_hash="c0de")
    return run_id


def new_store(path: Path) -> Store:
    """An empty store."""
    store = Store(path, lock_timeout=5.0)
    with store.connect(create=True):
        pass
    return store
