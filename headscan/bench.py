"""``make bench``: what measuring costs, as ratios of times taken in turn within one process.

    python -m headscan.bench [--device cuda] [--dtype bfloat16] [--lengths 512 2048]

It needs this package alone. Shapes are random-weight Llama models; times are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headscan
from headscan.catalog import SCORES, statistics_for
from headscan.discovery import discover
from headscan.inputs import run

#: Name: hidden size, query heads, KV heads, MLP width, layers that are run.
SHAPES = {"135M shape": (576, 9, 3, 1536, 4), "1B shape": (2048, 32, 8, 8192, 2)}


def make_model(shape: str, tokens: int, device: str, dtype: torch.dtype) -> headscan.LoadedModel:
    """A few layers of a shape with random weights: the ratios are those of the whole depth."""
    hidden, heads, kv_heads, mlp, layers = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(dtype)
    model.to(torch.device(device))
    model.set_attn_implementation("sdpa")
    return headscan.LoadedModel(model, None, discover(model), shape)


def measure(lm: headscan.LoadedModel, tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way to run one sequence."""
    ids = torch.randint(0, 1024, (1, tokens), device=lm.device)

    @torch.no_grad()
    def plain() -> None:
        run(lm.model, {"input_ids": ids})

    ways: dict[str, Callable[[], object]] = {
        "plain": plain,
        "15 scores": lambda: headscan.collect(lm, ids, statistics=statistics_for(SCORES)),
        "all statistics": lambda: headscan.collect(lm, ids),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if lm.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, {options.dtype}, {torch.get_num_threads()} threads")
    print(f"{'shape':<12} {'tokens':>6} {'plain, s':>9} {'15 scores':>10} {'all':>6}   (times over the plain forward)")
    for shape in SHAPES:
        for tokens in options.lengths:
            lm = make_model(shape, tokens, options.device, getattr(torch, options.dtype))
            seconds = measure(lm, tokens, options.rounds)
            ratios = [seconds[name] / seconds["plain"] for name in ("15 scores", "all statistics")]
            print(f"{shape:<12} {tokens:>6} {seconds['plain']:>9.3f} {ratios[0]:>10.2f} {ratios[1]:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
