"""Speed of replicas, Ray and a pipeline, relative to one thread; and the driver of many workers.

    python -m tests.benchmarks.bench_pools [--shards 6] [--rounds 3]
    python -m tests.benchmarks.bench_pools --imagined 64 [--shards 6] [--killed 10]

Each way measures the same shards of a random model, in turn, round after round: ratios are medians over the rounds. On
a busy machine they say little; the load is printed.

``--imagined`` opens the product's pool on a local Ray with so many workers that give ready-made tables, and prints the
seconds until all answer and what the driver of a scan costs, then of a scan with four times as many shards. In a third
scan, workers are killed at once. Every store is checked for lost and doubled rows. On a local Ray a worker reserves no
CPU, so any number fits on two cores; 64 of them fit in 10 GB.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from transformers.utils import logging

from headscan.catalog import MassWidths, panel_names
from headscan.cluster.placements import PipelinePlacement, WholePlacement
from headscan.cluster.pool import InProcessPool, Pool
from headscan.cluster.ray_pool import PipelinePool, RayPool
from headscan.cluster.ray_session import RaySession
from headscan.model_spec import ModelSpec
from headscan.steps.run_scan import MeasureShard
from headscan.texts import Shard, TokenSequence
from tests.benchmarks.imagined_scans import ImaginedPool, Killer, pid_of, scan_imagined
from tests.benchmarks.imagined_workers import ShardShape
from tests.benchmarks.random_checkpoint import Shape, make_checkpoint

_SHAPE = Shape(layers=8, hidden=512, mlp=2048, heads=8, kv_heads=4)
_SEQUENCES, _TOKENS, _BATCH = 8, 256, 512
#: Shards of imagined workers, as of an 8B model.
_IMAGINED = ShardShape(layers=32, heads=32, sequences=8, tokens=512)


def random_shards(count: int) -> list[Shard]:
    """Shards of random tokens, four passes each."""
    generator = np.random.default_rng(0)
    shards = []
    for number in range(count):
        texts = tuple(
            TokenSequence(i, i, "made", generator.integers(0, _SHAPE.vocabulary, _TOKENS, dtype=np.int32), False, "")
            for i in range(number * _SEQUENCES, (number + 1) * _SEQUENCES)
        )
        shards.append(Shard(number, texts, ""))
    return shards


def seconds(pools: Mapping[str, Pool], shards: list[Shard], rounds: int) -> dict[str, list[float]]:
    """How long each pool takes for all shards, round by round."""
    task = MeasureShard(tuple(sorted(panel_names("fast"))), MassWidths(), _BATCH, keep_nonfinite=False)
    took: dict[str, list[float]] = {name: [] for name in pools}
    for turn in range(rounds + 1):
        for name, pool in pools.items():
            began = time.perf_counter()
            list(pool.map(task, shards if turn else shards[:2]))
            if turn:  # the first turn loads the model
                took[name].append(time.perf_counter() - began)
                print(f"round {turn}: {name:13} {took[name][-1]:6.2f} s; load {os.getloadavg()[0]:.1f}", flush=True)
    return took


def imagine(workers: int, shards: int, killed: int, seconds: float) -> None:
    """Print what the driver of many workers costs; ``shards`` is the number per worker. A shard takes ``seconds`` while
    workers are killed, else no time.
    """
    began = time.perf_counter()
    with ImaginedPool(workers) as pool, tempfile.TemporaryDirectory() as folder:
        opened = time.perf_counter() - began
        names = pool.all_answer()
        took = time.perf_counter() - began
        memory = sum(psutil.Process(pid_of(name)).memory_full_info().uss for name in names) / workers
        print(f"{workers} workers: the pool is open after {opened:.1f} s, all answer after {took:.1f} s; ", end="")
        print(f"{memory / 2**20:.0f} MiB of its own each", flush=True)
        scan_imagined(pool, Path(folder) / "warm.duckdb", _IMAGINED, 2 * workers)  # imports, and tables in all workers
        for number, times in enumerate((1, 4)):
            count = times * shards * workers
            cost = scan_imagined(pool, Path(folder) / f"{number}.duckdb", _IMAGINED, count)
            print(f"{count} shards: {cost}", flush=True)
        killer = Killer(pool, killed, after=shards * workers // 4)
        scan_imagined(
            pool, Path(folder) / "killed.duckdb", _IMAGINED, shards * workers, seconds=seconds, watch=[killer]
        )
        print(
            f"{len(killer.killed)} workers killed at once had {killer.held} shards of {seconds:g} s; {killer.again} "
            f"were measured again, the last after {killer.recovered:.1f} s; no row is lost or doubled"
        )
        if killer.replaced:
            last = max(killer.replaced.values())
            print(f"{len(killer.replaced)} new workers gave shards, the last its first after {last:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=6, help="of a round, or of each imagined worker (default: 6)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imagined", type=int, metavar="N", help="workers that give ready-made tables")
    parser.add_argument("--killed", type=int, default=10, help="imagined workers killed at once (default: 10)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a shard while workers are killed (default: 5)")
    options = parser.parse_args()
    if options.imagined is not None:
        imagine(options.imagined, options.shards, options.killed, options.seconds)
        return
    logging.disable_progress_bar()
    layers, half = _SHAPE.layers, _SHAPE.layers // 2
    with tempfile.TemporaryDirectory() as folder, ExitStack() as pools_open:
        make_checkpoint(Path(folder), _SHAPE)
        spec = ModelSpec(folder)
        session = RaySession(8)
        pools_open.callback(session.close)
        pools: dict[str, Pool] = {
            "in-process": InProcessPool(spec, WholePlacement(1, "cpu", 1)),
            "ray x 1": RayPool(spec, WholePlacement(1, "cpu", 1)),
            "ray x 2": RayPool(spec, WholePlacement(2, "cpu", 1)),
            "pipeline x 2": PipelinePool(spec, PipelinePlacement(1, ((0, half), (half, layers)), "cpu", 1)),
        }
        for pool in pools.values():
            pools_open.enter_context(pool)
        took = seconds(pools, random_shards(options.shards), options.rounds)
    print(f"{options.shards} shards of {_SEQUENCES} x {_TOKENS} tokens, one thread a worker")
    for name, values in took.items():
        print(f"{name:13} {median(values):6.2f} s, {median(values) / options.shards:.2f} s a shard")
    for name, other in (("ray x 1", "in-process"), ("ray x 1", "ray x 2"), ("in-process", "pipeline x 2")):
        ratios = [a / b for a, b in zip(took[name], took[other], strict=True)]
        print(f"{name} / {other}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
