"""Time of the table of single heads, relative to its masks scored one by one.

    python -m tests.benchmarks.bench_single_heads [--questions 50] [--device cuda] [--dtype bfloat16]

The demo model answers its own task. Every item of an evaluation's work is answered by the whole table and by some of
its masks alone, in turn, so that a machine that changes its speed changes both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import headscan
from headscan.ablation.intervention import Intervention
from headscan.ablation.masks import HeadMask
from headscan.engine.answer import AnsweringSettings, answer
from headscan.engine.answering import request_chunks
from headscan.engine.bundles import bundle_passes, bundle_size, latest_start
from headscan.models.loaded_model import LoadedModel
from headscan.settings.evaluation_settings import TaskConfig
from headscan.texts.continuation_task import DEMO_TASK, write_task
from headscan.texts.stdlib_files import held_out_files
from headscan.texts.token_requests import Request
from tests.benchmarks.bench_arms import task_requests

_BATCH_TOKENS = 8192
#: One mask in so many is scored alone.
_EVERY = 6


def table(lm: LoadedModel, arms: Sequence[Intervention | None], requests: tuple[Request, ...]) -> list[list[float]]:
    """Log-likelihoods under each arm, with shared layers."""
    found: dict[int, list[float]] = {}
    settings = AnsweringSettings(_BATCH_TOKENS, share_prefixes=True)
    starts = [None if arm is None else latest_start(arm) for arm in arms]
    for group in bundle_passes(starts, bundle_size({}, 0)):
        results = answer(lm, requests, [arms[index] for index in group], settings)
        for index, result in zip(group, results, strict=True):
            found[index] = [each.log_likelihood for each in result.values]
    return [found[index] for index in range(len(arms))]


def alone(lm: LoadedModel, mask: Intervention | None, requests: tuple[Request, ...]) -> list[float]:
    """Log-likelihoods under one arm."""
    [result] = answer(lm, requests, [mask], AnsweringSettings(_BATCH_TOKENS, share_prefixes=True))
    return [each.log_likelihood for each in result.values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    lm = headscan.load("demo", device=options.device, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_task(Path(scratch), held_out_files(), options.questions)
        requests = task_requests(TaskConfig((DEMO_TASK,), str(folder)), lm.require_tokenizer())
    arms = [None, *(HeadMask([head]) for head in lm.grid.heads())]
    chosen = range(1, len(arms), _EVERY)
    table(lm, arms[:2], tuple(requests[:8]))  # the first passes of a process take longer
    of_table = of_one = difference = 0.0
    for part in (
        item.requests
        for item in request_chunks({str(number): request for number, request in enumerate(requests)}, _BATCH_TOKENS)
    ):
        began = time.perf_counter()
        found = table(lm, arms, part)
        between = time.perf_counter()
        single = {index: alone(lm, arms[index], part) for index in chosen}
        of_table += between - began
        of_one += (time.perf_counter() - between) / len(chosen)
        for index, values in single.items():
            difference = max(difference, *(abs(a - b) for a, b in zip(values, found[index], strict=True)))
    heads = len(arms) - 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {lm.dtype}, {lm.device}")
    print(f"{len(requests)} requests: the table of {heads} heads {of_table:.1f} s, one mask alone {of_one:.2f} s")
    print(f"the table relative to one mask for each head: {of_table / of_one / heads:.2f}")
    print(f"largest difference of a log-likelihood: {difference:.0e}")


if __name__ == "__main__":
    main()
