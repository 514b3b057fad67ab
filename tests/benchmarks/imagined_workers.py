"""Workers that give ready-made tables: what runs in their processes, which import neither torch nor transformers.

A worker with both takes 300 MB of its own and starts in seconds of CPU; without, many fit on a small machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.catalog import panel_names
from headscan.steps.run_corpus import ShardTable
from headscan.texts import Shard, TokenSequence

_GROUP = 8


class ShardShape(NamedTuple):
    """Size of a shard and of its table."""

    layers: int
    heads: int
    sequences: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.layers * self.heads * self.sequences


class ImaginedWorker:
    """An actor with the methods of `cluster.worker.Worker`, which loads no model."""

    def __init__(self, *placement: Any) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def beat(self) -> str:
        return self._name

    def run(self, task: Callable[[object, Any], Any], item: Any) -> tuple[Any, float, str]:
        started = time.perf_counter()
        return task(None, item), time.perf_counter() - started, self._name


def answer(model: object, seconds: float) -> None:
    """A pool task that only takes time."""
    time.sleep(seconds)


def imagine_shard(model: object, shard: Shard, *, shape: ShardShape, seconds: float = 0.0) -> ShardTable:
    """A pool task with the result of `MeasureShard`: a ready-made table for the sequences of this shard."""
    time.sleep(seconds)
    indices = np.array([text.index for text in shard.sequences], dtype=np.int32)
    sequences = pa.array(indices.repeat(shape.layers * shape.heads))
    return ShardTable(made_table(shape).append_column("sequence", sequences), 0)


@cache
def made_table(shape: ShardShape) -> pa.Table:
    """Random statistics of the fast panel, as `MeasureShard` gives them, without the indices of the sequences."""
    layers, heads, sequences, _ = shape
    generator = np.random.default_rng(0)
    head = np.tile(np.arange(heads, dtype=np.int16), sequences * layers)
    columns = {
        "site": pa.DictionaryArray.from_arrays(pa.array(np.zeros(shape.rows, dtype=np.int8)), ["self"]),
        "layer": np.tile(np.repeat(np.arange(layers, dtype=np.int16), heads), sequences),
        "head": head,
        "kv_head": head // _GROUP,
    }
    return pa.table(columns | {name: generator.random(shape.rows, dtype=np.float32) for name in panel_names("fast")})


def made_shards(count: int, shape: ShardShape) -> Iterator[Shard]:
    """Shards of random tokens."""
    generator = np.random.default_rng(0)
    for number in range(count):
        first = number * shape.sequences
        texts = (
            TokenSequence(i, i, "made", generator.integers(0, 2**16, shape.tokens, dtype=np.int32), False, f"{i:016x}")
            for i in range(first, first + shape.sequences)
        )
        yield Shard(number, tuple(texts), f"{number:016x}")
