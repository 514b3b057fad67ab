"""Time and memory of measuring, relative to a plain forward pass.

    python -m tests.benchmarks.bench_instrument [--device cuda] [--dtype bfloat16] [--shapes 135M 1B 8B]

It needs torch, transformers and accelerate alone.
"""

from __future__ import annotations

import argparse

import torch

from headscan.testing.overhead import (
    SHAPES,
    VOCABULARY,
    attention_seconds,
    eager_bytes,
    free_bytes,
    make_model,
    peak_bytes,
    processor,
    seconds,
    ways,
)

#: Lengths that a shape runs at unless others are asked for: the larger ones take a CPU minutes.
LENGTHS = {"135M": (512, 2048, 8192), "1B": (512, 2048), "8B": (512,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", nargs="+", default=["135M", "1B"], choices=SHAPES)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {LENGTHS}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-eager", action="store_true", help="leave eager attention out")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {processor(options.device)}, {options.dtype}")
    print("time and peak memory over those of the plain sdpa forward pass\n")
    names = ["15 scores", "fast panel", "full panel", "eager"]
    print(f"| shape | tokens | plain | attention | {' | '.join(names)} |\n|---|---|---|---|{'---|' * len(names)}")
    for shape in options.shapes:
        for tokens in options.lengths or LENGTHS[shape]:
            lm = make_model(shape, tokens, options.device, dtype)
            ids = torch.randint(0, VOCABULARY, (1, tokens), device=lm.device)
            wanted, free = eager_bytes(shape, tokens, dtype), free_bytes(options.device)
            chosen = ways(lm, ids, eager=not options.no_eager and wanted < 0.8 * free)
            rounds = options.rounds if tokens < 8192 else min(options.rounds, 2)
            took = seconds(lm, chosen, rounds)
            share = attention_seconds(lm, tokens, rounds) / took["plain"]
            peaks = {name: peak_bytes(lm, way) for name, way in chosen.items()}
            cells = [f"{took['plain']:.2f} s, {peaks['plain'] / 2**20:.0f} MiB", f"{share:.0%}"]
            for name in names:
                if name in took:
                    cells.append(f"{took[name] / took['plain']:.2f}x, {peaks[name] / peaks['plain']:.2f}x")
                else:
                    cells.append("-" if options.no_eager else f"would keep {wanted / 2**30:.0f} GiB")
            print(f"| {shape} | {tokens} | {' | '.join(cells)} |", flush=True)
            del lm, ids, chosen


if __name__ == "__main__":
    main()
