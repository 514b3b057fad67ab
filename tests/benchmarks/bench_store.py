"""How many head rows a second a driver takes from a cluster into the store.

    python -m tests.benchmarks.bench_store [--layers 80 --heads 64] [--workers 2] [--shards 40]

Workers are imagined: real Ray actors that give tables of real size, made beforehand, without a model. All else is what
a scan does: items to the workers, tables back through Ray's object store, rows and ledger into DuckDB, on the same
cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.analysis.store.records import RunRecord
from headscan.analysis.store.store import Store
from headscan.catalog import MassWidths, panel_names
from headscan.cluster.placement.placements import WholePlacement
from headscan.cluster.pools.ray_pool import RayPool
from headscan.cluster.tasks.pool import Finished
from headscan.model_spec import ModelSpec
from headscan.pipelines.corpora import CorpusReport, Shard, TokenSequence
from headscan.pipelines.measure.run_corpus import write_shards
from headscan.pipelines.measure.shard_task import Measured, ShardItem
from headscan.pipelines.runs.run_records import Run

_GROUP = 8


class ImaginedModel(ModelSpec):
    """Layers, heads and sequences of a shard, as numbers; what is loaded for them is a table of the right size."""

    def load(self, target: Any) -> Any:
        return made_table(*map(int, self.source.split()))


class ImaginedWorkers(RayPool):
    """Replicas that give made-up tables in the place of measured ones."""

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Finished[Any, Any]]:
        return super().map(imagine_shard, items)


def made_table(layers: int, heads: int, sequences: int) -> pa.Table:
    """Random statistics of the fast panel, as `shard_task` gives them."""
    rows = sequences * layers * heads
    generator = np.random.default_rng(0)
    head = np.tile(np.arange(heads, dtype=np.int16), sequences * layers)
    site = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int8)), ["self"])
    columns = {
        "site": site,
        "layer": np.tile(np.repeat(np.arange(layers, dtype=np.int16), heads), sequences),
        "head": head,
        "kv_head": head // _GROUP,
    }
    return pa.table(columns | {name: generator.random(rows, dtype=np.float32) for name in panel_names("fast")})


def imagine_shard(table: pa.Table, item: ShardItem) -> Measured:
    """A pool task: the table that stands in the model's place, for the sequences of this shard."""
    rows = table.num_rows // len(item.shard.sequences)
    indices = np.repeat(np.array([s.index for s in item.shard.sequences], dtype=np.int32), rows)
    return Measured(table.append_column("sequence", pa.array(indices)), 0)


def made_shards(count: int, sequences: int, tokens: int) -> Iterator[Shard]:
    """Shards of random tokens."""
    generator = np.random.default_rng(0)
    for number in range(count):
        first = number * sequences
        texts = (
            TokenSequence(i, i, "made", generator.integers(0, 2**16, tokens, dtype=np.int32), False, f"{i:016x}")
            for i in range(first, first + sequences)
        )
        yield Shard(number, tuple(texts), f"{number:016x}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence (default: 2048)")
    parser.add_argument("--shard-size", type=int, default=64)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the store is made (default: the temporary folder)")
    options = parser.parse_args()

    def item_of(shard: Shard) -> ShardItem:
        return ShardItem(shard, (), MassWidths(), options.tokens, keep_nonfinite=False)

    model = ImaginedModel(f"{options.layers} {options.heads} {options.shard_size}")
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        ImaginedWorkers(model, WholePlacement(options.workers, "cpu", 1)) as pool,
    ):
        store = Store(Path(folder) / "scale.duckdb")
        warm = [item_of(shard) for shard in made_shards(4 * options.workers, options.shard_size, options.tokens)]
        list(pool.map(imagine_shard, warm))  # until every worker is there and has made its table
        run = Run(model, store, lambda _: pool, say=print)
        record = RunRecord("scan", "imagined", "imagined", options.layers, options.heads)
        shards = list(made_shards(options.shards, options.shard_size, options.tokens))
        began, used = time.perf_counter(), time.process_time()
        write_shards(run, record, shards, item_of, CorpusReport(), total=None)
        took, used = time.perf_counter() - began, time.process_time() - used
        rows = options.shards * options.shard_size * options.layers * options.heads
        held = store.query("select count(*) as rows from head_statistics").to_pylist()[0]["rows"]
        assert held == rows, f"{held} rows of {rows} are in the store"
        size = store.path.stat().st_size
    print(f"{rows:,} head rows in {took:.2f} s: {rows / took / 1e6:.2f} M rows/s", end="; ")
    print(f"{rows / took / options.layers / options.heads:.0f} sequences/s; driver {used / took:.2f} cores", end="; ")
    print(f"store {size / rows:.1f} bytes a row")


if __name__ == "__main__":
    main()
