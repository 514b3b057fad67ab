"""Text generated with the full KV cache and with a plan's, one after the other on one replica."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer

from headscan.attention.cache_attention import cache_attention
from headscan.cluster.pool import refuse_staged
from headscan.errors import SequenceError
from headscan.kv.plan_cache import PlanCache, cache_bytes
from headscan.models.loaded_model import LoadedModel
from headscan.runs.run_context import ModelContext
from headscan.steps.generate import Generate
from headscan.steps.plan_arms import check_plan
from headscan.text_tables import counted
from headscan.windows import KeptKeys

#: Prompt tokens of the pass that warms up.
_WARM_UP = 32


@dataclass(frozen=True)
class GenerationTask:
    """A prompt to continue greedily, ``rounds`` times for median times. ``prefill_chunk`` prompt tokens are read at a
    time, which bounds the peak memory; None reads all at once.
    """

    kept: KeptKeys
    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    prefill_chunk: int | None = None
    rounds: int = 1
    name: str = "generation"


@dataclass(frozen=True)
class Generated:
    """One text and its cost.

    Attributes:
        text: The tokens decoded; empty for a model without a tokenizer.
        cache_bytes: Bytes of keys and values that the cache holds after the last token.
        prefill_seconds: Time to the first token.
        token_seconds: Median time of each further token; None if there is only one.
        peak_bytes: Peak memory of all tensors on the GPU, weights included; None on a CPU.
    """

    tokens: tuple[int, ...]
    cache_bytes: int
    prefill_seconds: float
    token_seconds: float | None
    peak_bytes: int | None
    text: str


@dataclass(frozen=True)
class GenerationComparison:
    """The text with the full KV cache, and with a plan's."""

    full: Generated
    planned: Generated
    prompt_tokens: int

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if the texts are equal."""
        pairs = zip(self.full.tokens, self.planned.tokens, strict=False)
        for index, (full, planned) in enumerate(pairs):
            if full != planned:
                return index
        lengths = len(self.full.tokens), len(self.planned.tokens)
        return None if lengths[0] == lengths[1] else min(lengths)


def run_generate(config: Generate, model: ModelContext) -> GenerationComparison:
    """Generate the text with both caches on one replica."""
    kept = config.head_plan.kept
    prompt = config.prompt_ids(model.identity)
    refuse_staged(model.pool, "generation of text")
    check_plan(config.head_plan, model)
    task = GenerationTask(kept, prompt, config.max_new_tokens, config.prefill_chunk, config.rounds)
    return model.pool.one(compare_generation, task)


def compare_generation(lm: LoadedModel, task: GenerationTask) -> GenerationComparison:
    """Pool task: generate the text with both caches, in turn."""
    total = len(task.prompt) + task.max_new_tokens
    if not task.prompt:
        raise SequenceError("the prompt has 0 tokens (limit 1). Give a prompt with text")
    if lm.max_tokens is not None and total > lm.max_tokens:
        raise SequenceError(
            f"prompt of {counted(len(task.prompt), 'token')} and {task.max_new_tokens} new ones are {total} (limit"
            f" {lm.max_tokens}, the model's context). Shorten the prompt, or lower `max_new_tokens`"
        )
    # The first passes of a process, and of each cache, are slow.
    _generate_both(lm, replace(task, prompt=task.prompt[:_WARM_UP], max_new_tokens=2))
    full, planned = zip(*(_generate_both(lm, task) for _ in range(task.rounds)), strict=True)
    return GenerationComparison(_typical(full), _typical(planned), len(task.prompt))


def _generate_both(lm: LoadedModel, task: GenerationTask) -> tuple[Generated, Generated]:
    """Generate the text with the full cache, and with the plan's."""
    full = _generate(lm, task, DynamicCache(config=lm.model.config))
    planned = PlanCache(task.kept, lm.model.config, max_tokens=len(task.prompt) + task.max_new_tokens)
    with cache_attention(lm.model):
        return full, _generate(lm, task, planned)


def _typical(rounds: Sequence[Generated]) -> Generated:
    steps = [each.token_seconds for each in rounds if each.token_seconds is not None]
    return replace(
        rounds[0],
        prefill_seconds=median(each.prefill_seconds for each in rounds),
        token_seconds=median(steps) if steps else None,
    )


class _Clock(BaseStreamer):
    """Records when each token arrives; `generate` also passes the prompt, first."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def put(self, value: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(lm: LoadedModel, task: GenerationTask, cache: Cache) -> Generated:
    on_gpu = lm.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(lm.device)
    ids = torch.tensor([task.prompt], device=lm.device)
    clock = _Clock(lm.device)
    chunk: dict[str, Any] = {} if task.prefill_chunk is None else {"prefill_chunk_size": task.prefill_chunk}
    with torch.no_grad():
        out: Any = lm.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=task.max_new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
            **chunk,
        )
    prompt, *tokens = clock.times
    steps = [after - before for before, after in pairwise(tokens)]
    generated = out[0, len(task.prompt) :].tolist()
    return Generated(
        tokens=tuple(generated),
        cache_bytes=cache_bytes(cache),
        prefill_seconds=tokens[0] - prompt,
        token_seconds=median(steps) if steps else None,
        peak_bytes=int(torch.cuda.max_memory_allocated(lm.device)) if on_gpu else None,
        text=str(lm.tokenizer.decode(generated)) if lm.tokenizer is not None else "",
    )
