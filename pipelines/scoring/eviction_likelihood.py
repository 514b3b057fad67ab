"""Log-likelihoods of continuations that are read from a KV cache with evicted keys, on one replica.

The model reads all tokens before the first prediction with full attention, the cache evicts keys, and the rest is read
from it. A pass over the whole input would not show the loss, since its queries see every key. A text that is scored
from its first token on has no context; its tokens see their windows.

Shapes: B sequences, N tokens (padded on the right).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from headscan.ablation.ablation import Ablation
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.scoring.batching import pad, run_halving
from headscan.pipelines.scoring.likelihood import (
    LikelihoodResult,
    Read,
    ReadAnswer,
    by_request,
    distinct_reads,
    likelihoods_at,
)
from headscan.pipelines.scoring.token_requests import Request


@dataclass(frozen=True)
class EvictionItem:
    """Requests for one replica.

    Attributes:
        ablated: An ablation that evicts keys.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return [score_evicted(lm, self)]


def score_evicted(lm: LoadedModel, item: EvictionItem) -> LikelihoodResult:
    """Pool task: answer requests from caches that evict keys after the context."""
    reads = distinct_reads(item.requests)
    contexts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, read in enumerate(reads):
        contexts[read.ids[: read.first_place]].append(index)
    found: dict[int, ReadAnswer] = {}
    with torch.no_grad():
        for context, rows in contexts.items():

            def answer(
                chosen: list[int], context: tuple[int, ...] = context, rows: list[int] = rows
            ) -> list[ReadAnswer]:
                return _continue(lm, item.ablated, context, [reads[rows[i]] for i in chosen])

            lengths = [len(reads[row].ids) for row in rows]
            for chosen, answers in run_halving(list(range(len(rows))), answer, lengths, lm.limits["evictions"]):
                found.update(zip((rows[i] for i in chosen), answers, strict=True))
    return by_request(reads, found)


def _continue(lm: LoadedModel, ablated: Ablation, context: tuple[int, ...], reads: list[Read]) -> list[ReadAnswer]:
    """Return the answers of reads that begin with ``context``."""
    cache = ablated.new_cache(lm, context=bool(context))
    if context:
        ids = torch.tensor([context], device=lm.device)
        run(lm.model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
        if len(reads) > 1:
            cache.batch_repeat_interleave(len(reads))
    ids, _ = pad([read.ids[len(context) :] for read in reads])
    places = [(row, place - len(context)) for row, read in enumerate(reads) for place in read.places]
    likelihoods = likelihoods_at(lm, reads, ids, places, past_key_values=cache, use_cache=True)
    return [ReadAnswer(of_read, 0.0) for of_read in likelihoods]
