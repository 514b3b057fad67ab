"""Cost of a KV cache with windows, in bytes and in time per token, compared with transformers' own caches.

    python -m tests.benchmarks.bench_cache [--device cuda --dtype bfloat16 --shape 8B --tokens 4096,32768]

Half of the KV heads are windows. Each way decodes in turn, token by token, after a context of random keys and values.
It needs torch, transformers and accelerate alone.
"""

from __future__ import annotations

import argparse

import torch

from headscan.gpu_proof.cache_speed import COLUMNS, CacheLoad, cache_rows, verdict_on_cache
from headscan.gpu_proof.table import Table, show
from headscan.testing.overhead import SHAPES, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="1B", choices=SHAPES)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(tokens) for tokens in text.split(",")],
        default=[4096, 16384],
        help="tokens of context, comma-separated; the last length decides on the goal (default: 4096,16384)",
    )
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="decoding steps in one round")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {processor(options.device)}, {options.dtype}\n")
    ratios: dict[str, tuple[float, float, float]] = {}
    table = Table("## A decoding step", COLUMNS)
    with torch.no_grad():
        for tokens in options.tokens:
            load = CacheLoad(options.shape, options.layers, tokens, options.rows, options.steps, options.dtype)
            for cells in cache_rows(load, device, ratios):
                table.row(*cells)
    show(f"\n{verdict_on_cache(ratios, device)}")


if __name__ == "__main__":
    main()
