"""Answers from a KV cache that evicts keys.

With an evicting cache the model reads all tokens before the first prediction with full attention, the cache evicts
keys, and the rest is read from it. A pass over the whole input would not show the loss, since its queries see every
key. A text that is scored from its first token on has no context; its tokens see the whole text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

import headscan
from headscan.ablation.intervention import Intervention
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import batches, pad, pass_tokens, run_halving
from headscan.pipelines.scoring.likelihood import (
    DistinctInput,
    InputResult,
    by_request,
    distinct_inputs,
    likelihoods_at,
)
from headscan.pipelines.scoring.token_requests import ArmItem, LogLikelihood, Request, Responses


@dataclass(frozen=True)
class EvictionItem(ArmItem[Request]):
    """Requests for one replica under an ablation that evicts keys."""

    intervention: Intervention

    def run(self, lm: LoadedModel) -> list[Responses[LogLikelihood]]:
        """Answer requests from caches that evict keys after the context."""
        # Keys are evicted at the end of each request's own context.
        reads = distinct_inputs(self.requests, same_context=True)
        lengths = [len(read.ids) for read in reads]
        # Contexts of one batch have the same length, so that none is padded and all evict at the same token.
        groups: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
        for row, read in enumerate(reads):
            groups[read.first_place, lm.rope_lengths.group(len(read.ids))].append(row)
        results: dict[int, InputResult] = {}

        def score(rows: list[int]) -> list[InputResult]:
            return _score(lm, self.intervention, [reads[row] for row in rows])

        with torch.no_grad(), headscan.intervene(lm, self.intervention):
            for members in groups.values():
                for batch in batches([lengths[row] for row in members], pass_tokens(lm.device.type, self.batch_tokens)):
                    rows = [members[i] for i in batch]
                    for chosen, found in run_halving(rows, score, lengths, lm.limits["evictions"]):
                        results.update(zip(chosen, found, strict=True))
        return [by_request(reads, results)]


def _score(lm: LoadedModel, intervention: Intervention, reads: list[DistinctInput]) -> list[InputResult]:
    """Return the results of reads whose contexts have the same length."""
    start = reads[0].first_place
    if start:
        # The context is read alone, so it needs the rotary frequencies of the whole text.
        lm.rope_lengths.check(max(len(read.ids) for read in reads), [start])
    cache = intervention.new_cache(lm, context=start > 0)
    if start:
        contexts = list(dict.fromkeys(read.ids[:start] for read in reads))
        ids = torch.tensor(contexts, device=lm.device)
        run_forward(lm.model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
        if len(contexts) < len(reads):
            row_of = {context: row for row, context in enumerate(contexts)}
            # Selecting rows as beam search does also works for recurrent states, and for layers on other devices.
            cache.reorder_cache(torch.tensor([row_of[read.ids[:start]] for read in reads]))  # type: ignore[arg-type]
    ids, _ = pad([read.ids[start:] for read in reads])
    places = [(row, place - start) for row, read in enumerate(reads) for place in read.places]
    likelihoods = likelihoods_at(lm, reads, ids, places, past_key_values=cache, use_cache=True)
    return [InputResult(of_read, 0.0) for of_read in likelihoods]
