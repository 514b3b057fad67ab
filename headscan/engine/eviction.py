"""Answers from a KV cache that evicts keys.

With an evicting cache the model reads all tokens before the first prediction with full attention, the cache evicts
keys, and the rest is read from it. A pass over the whole input would not show the loss, since its queries see every
key. A text that is scored from its first token on has no context; its tokens see the whole text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

import headscan
from headscan.ablation.intervention import Intervention
from headscan.engine.likelihood import DistinctInput, InputResult, by_request, distinct_inputs, likelihoods_at
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import batches, pad, pass_tokens, run_halving
from headscan.texts.token_requests import LogLikelihood, Request, Responses


def evicted_likelihoods(
    lm: LoadedModel, requests: Sequence[Request], eviction: Intervention, batch_tokens: int
) -> Responses[LogLikelihood]:
    """Answer requests from caches that evict keys after the context."""
    # Keys are evicted at the end of each request's own context.
    inputs = distinct_inputs(requests, same_context=True)
    lengths = [len(one_input.ids) for one_input in inputs]
    # Contexts of one batch have the same length, so that none is padded and all evict at the same token.
    groups: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for index, one_input in enumerate(inputs):
        groups[one_input.first_scored, lm.rope_lengths.group(len(one_input.ids))].append(index)
    results: dict[int, InputResult] = {}

    def score(indices: list[int]) -> list[InputResult]:
        return _score(lm, eviction, [inputs[index] for index in indices])

    most_tokens = pass_tokens(lm.device.type, batch_tokens)
    with torch.no_grad(), headscan.intervene(lm, eviction):
        for group in groups.values():
            for batch in batches([lengths[index] for index in group], most_tokens):
                indices = [group[i] for i in batch]
                for scored, batch_results in run_halving(indices, score, lengths, lm.limits["evictions"]):
                    results.update(zip(scored, batch_results, strict=True))
    return by_request(inputs, results)


def _score(lm: LoadedModel, intervention: Intervention, inputs: list[DistinctInput]) -> list[InputResult]:
    """Return the results of inputs whose contexts have the same length."""
    start = inputs[0].first_scored
    if start:
        # The context is read alone, so it needs the rotary frequencies of the whole text.
        lm.rope_lengths.check(max(len(one_input.ids) for one_input in inputs), [start])
    cache = intervention.new_cache(lm, context=start > 0)
    if start:
        contexts = list(dict.fromkeys(one_input.ids[:start] for one_input in inputs))
        context_ids = torch.tensor(contexts, device=lm.device)
        run_forward(lm.model, {"input_ids": context_ids, "past_key_values": cache, "use_cache": True})
        if len(contexts) < len(inputs):
            row_of = {context: row for row, context in enumerate(contexts)}
            context_rows = torch.tensor([row_of[one_input.ids[:start]] for one_input in inputs])
            # Selecting rows as beam search does also works for recurrent states, and for layers on other devices.
            cache.reorder_cache(context_rows)  # type: ignore[arg-type]
    ids, _ = pad([one_input.ids[start:] for one_input in inputs])
    positions = [
        (row, position - start) for row, one_input in enumerate(inputs) for position in one_input.scored_positions
    ]
    likelihoods = likelihoods_at(lm, inputs, ids, positions, past_key_values=cache, use_cache=True)
    return [InputResult(input_likelihoods, 0.0) for input_likelihoods in likelihoods]
