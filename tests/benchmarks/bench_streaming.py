"""Time and memory of a streamed scan, relative to one in memory.

    python -m tests.benchmarks.bench_streaming [--layers 28 --hidden 1536 ...] [--sequences 8 --tokens 512] [--folder F]

A checkpoint with random weights is made, unless the folder has one, and scanned in processes of their own: their peak
memory is that of the scan alone. The bars: at most 1.25 times the time, and a peak above what the process took before
of at most the two largest ranges of layers, the hidden states, and 20 %, on a checkpoint of at least five times that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import headscan
from headscan import texts as corpora
from headscan.architectures import make_loaded
from headscan.catalog import MassWidths, panel_names
from headscan.cluster.devices import usable_cores
from headscan.cluster.placements import StreamedPlacement, WholePlacement
from headscan.cluster.pool import open_pool
from headscan.model_spec import ModelSpec
from headscan.steps.run_scan import MeasureShard
from tests.benchmarks.random_checkpoint import Shape, make_checkpoint, shape_of, shape_options

#: The bars.
MOST_TIME, SLACK, LEAST_CHECKPOINT = 1.25, 1.2, 5.0
_SHARD = 4


def measure(folder: Path, placement: StreamedPlacement | WholePlacement, options: argparse.Namespace) -> dict[str, Any]:
    """Scan random texts in this process: seconds, those of its threads, bytes of the peak above before, a checksum."""
    torch.set_num_threads(placement.threads)
    with torch.no_grad():
        headscan.collect(make_loaded("llama"), torch.arange(40)[None] % 97)  # what is made at the first use
    pa.chunked_array([[0.0]]).to_numpy()  # imports pandas, 50 MB
    rng = np.random.default_rng(0)
    texts = [
        corpora.TokenSequence(
            i, i, "random", rng.integers(1, options.vocabulary, options.tokens, dtype=np.int32), False, ""
        )
        for i in range(options.sequences)
    ]
    task = MeasureShard(tuple(sorted(panel_names("fast"))), MassWidths(), options.batch_tokens, False)
    shards = [corpora.Shard(i, tuple(texts[i : i + _SHARD]), "") for i in range(0, len(texts), _SHARD)]
    spec = ModelSpec(str(folder))
    pool = open_pool(spec, placement)
    base = _reset_peak()
    started, computed = time.perf_counter(), time.process_time()
    total = 0.0
    with pool:
        for done in pool.map(task, shards):
            total += float(np.nansum(done.value.heads["output_norm"].to_numpy()))
        seconds, computed = time.perf_counter() - started, time.process_time() - computed
        peak = _memory("VmHWM") - base
    return {"seconds": seconds, "computed": computed, "peak": peak, "sum": total}


def _reset_peak() -> int:
    """Let the peak begin again; bytes that the process takes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"this system does not tell {name}: run the benchmark on Linux")


def _placements(shape: Shape, options: argparse.Namespace) -> tuple[StreamedPlacement, int, int]:
    """Ranges of so many layers, bytes of the two largest that follow each other, and of the hidden states."""
    heads_width = shape.kv_heads * shape.hidden // shape.heads
    block = 4 * (2 * shape.hidden * (shape.hidden + heads_width) + 3 * shape.hidden * shape.mlp + 2 * shape.hidden)
    end = 4 * shape.vocabulary * shape.hidden
    bounds = [*range(0, shape.layers, options.range_layers), shape.layers]
    ranges = tuple(pairwise(bounds))
    sizes = [(last - first) * block + end * (first == 0) + end * (last == shape.layers) for first, last in ranges]
    largest = sum(sorted(sizes)[-2:])
    hidden = 4 * options.sequences * options.tokens * shape.hidden
    memory = int(SLACK * (largest + hidden)) + 2 * hidden
    return StreamedPlacement("cpu", options.threads, memory, ranges), largest, hidden


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures with their limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_streaming", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made and left")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--range-layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--only", choices=("whole", "streamed"), help=argparse.SUPPRESS)
    shape_options(parser)
    options = parser.parse_args(arguments)
    shape = shape_of(options)
    placement, largest, hidden = _placements(shape, options)
    if options.only:
        chosen = placement if options.only == "streamed" else WholePlacement(1, "cpu", options.threads)
        print(json.dumps(measure(options.folder, chosen, options)))
        return
    with ExitStack() as context:
        folder = options.folder or Path(context.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "config.json").exists():
            make_checkpoint(folder, shape)
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        found = {}
        for only in ("whole", "streamed"):
            given = [*(sys.argv[1:] if arguments is None else arguments), "--folder", str(folder), "--only", only]
            command = [sys.executable, "-m", "tests.benchmarks.bench_streaming", *given]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[only] = json.loads(out.splitlines()[-1])
    whole, streamed = found["whole"], found["streamed"]
    limit = SLACK * (largest + hidden)
    print(f"checkpoint {_mib(weights)}, {len(placement.ranges)} ranges, the two largest {_mib(largest)}")
    print(f"{options.sequences} sequences of {options.tokens} tokens, hidden states {_mib(hidden)}")
    for name, one in (("in memory", whole), ("streamed", streamed)):
        print(f"{name:9} {one['seconds']:.1f} s, {one['computed']:.1f} s of CPU time, peak {_mib(one['peak'])}")
    ratio, computed = (streamed[name] / whole[name] for name in ("seconds", "computed"))
    print(f"time      {ratio:.2f} x, bar {MOST_TIME} x (CPU time {computed:.2f} x)")
    print(f"peak      {streamed['peak'] / limit:.2f} of {_mib(limit)}, bar 1")
    print(f"checkpoint {weights / limit:.1f} x that limit, bar {LEAST_CHECKPOINT:g} x")
    print(f"sums differ by {abs(whole['sum'] - streamed['sum']) / abs(whole['sum']):.1e}")


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
