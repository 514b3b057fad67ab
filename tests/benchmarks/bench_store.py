"""How many head rows a second a driver takes from a cluster into the store.

    python -m tests.benchmarks.bench_store [--layers 80 --heads 64] [--workers 2] [--shards 40]

Workers are real Ray actors that give tables of real size, made beforehand, without a model. All else is what a scan
does: items to the workers, tables back through Ray's object store, rows and ledger into DuckDB, on the same cores.
`bench_pools --imagined` asks the same of many workers.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from tests.benchmarks.imagined_scans import ImaginedPool, scan_imagined
from tests.benchmarks.imagined_workers import ShardShape, imagine_shard, made_shards


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
    shape = ShardShape(options.layers, options.heads, options.shard_size, options.tokens)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ImaginedPool(options.workers) as pool:
        pool.all_answer()
        # Until every worker has made its table.
        list(pool.map(partial(imagine_shard, shape=shape), made_shards(4 * options.workers, shape)))
        path = Path(folder) / "scale.duckdb"
        cost = scan_imagined(pool, path, shape, options.shards)
        size = path.stat().st_size
    sequences = options.shards * options.shard_size / cost.seconds
    print(f"{cost}; {sequences:.0f} sequences/s; store {size / cost.rows:.1f} bytes a row")


if __name__ == "__main__":
    main()
