"""Text generation with heads ablated, on one replica.

A mask applies to every token. Rules and random heads choose heads on the prompt, and the same heads stay ablated while
the text is generated, since its tokens come one at a time from a KV cache.

Shapes: B prompts, N tokens (padded on the left).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria

import headscan
from headscan.ablation.intervention import Ablation, Intervention
from headscan.ablation.masks import HeadMask
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import batches, run_halving
from headscan.texts.token_requests import GenerationRequest, Responses, input_key


def generated_texts(
    lm: LoadedModel,
    requests: Sequence[GenerationRequest],
    change: Intervention | None,
    batch_tokens: int,
    one_by_one: bool = False,
) -> Responses[str]:
    """Continue prompts under one change, ``one_by_one`` or in batches; prompts that decide which heads are ablated are
    alone, too.
    """
    texts: dict[int, str] = {}
    shares: dict[int, float] = {}
    static = change is None or change.fixed
    total = lm.grid.total_heads
    # Prompts of one batch have the same stop sequences. Prompts whose heads depend on them run alone, and so do sampled
    # prompts: drawn in batches by one arm and alone by another, they would be different samples.
    groups: dict[Hashable, list[int]] = {}
    for index, request in enumerate(requests):
        alone = one_by_one or not static or bool(dict(request.options).get("do_sample"))
        groups.setdefault(index if alone else (repr(request[1:-1]), _rope_group(lm, request)), []).append(index)
    with torch.no_grad():
        for rows in groups.values():
            lengths = [len(requests[row].ids) + requests[row].max_new_tokens for row in rows]
            for batch in batches(lengths, batch_tokens):
                mask = change if static else _seen(lm, change, requests[rows[batch[0]]])

                def write(chosen: list[int], rows: list[int] = rows, mask: Intervention | None = mask) -> list[str]:
                    return _write(lm, [requests[rows[i]] for i in chosen], mask)

                for chosen, written in run_halving(batch, write, lengths, lm.limits["generation"]):
                    for i, text in zip(chosen, written, strict=True):
                        texts[rows[i]] = text
                        shares[rows[i]] = 0.0 if mask is None else len(mask.fixed_heads or ()) / total
    order = range(len(requests))
    return Responses(tuple(texts[i] for i in order), tuple(shares[i] for i in order))


def _rope_group(lm: LoadedModel, request: GenerationRequest) -> Hashable:
    """Return a key that is equal for equal rotary frequencies at every step of the generation. A prompt whose text may
    cross a length at which the frequencies change shares a batch only with equally long ones.
    """
    tokens = len(request.ids)
    start, end = (lm.rope_lengths.group(length) for length in (tokens, tokens + request.max_new_tokens))
    return start if start == end else tokens


def _seen(lm: LoadedModel, change: Intervention | None, request: GenerationRequest) -> HeadMask | None:
    assert isinstance(change, Ablation)
    ids = torch.tensor([request.ids], device=lm.device)
    with headscan.intervene(lm, change, input_keys=[input_key(request.ids)]) as record:
        run_forward(lm.model, {"input_ids": ids})
    ablated_BLH = record.ablated
    assert ablated_BLH is not None
    heads = [(int(layer), int(head)) for layer, head in ablated_BLH[0].nonzero()]
    return HeadMask(heads, change.replacement) if heads else None


def _write(lm: LoadedModel, requests: list[GenerationRequest], mask: Intervention | None) -> list[str]:
    tokenizer = lm.require_tokenizer()
    first = requests[0]
    longest = max(len(request.ids) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.ids) :] = torch.tensor(request.ids)
        real[row, longest - len(request.ids) :] = 1
    end = tokenizer.decode([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else None
    until = handle_stop_sequences(list(first.until), eos=end)
    ablated: AbstractContextManager[Any] = nullcontext() if mask is None else headscan.intervene(lm, mask)
    cache = {"past_key_values": mask.new_cache(lm)} if mask is not None and mask.evicts else {}
    with ablated, torch.random.fork_rng():
        # Sampling is seeded by batch, so that a repeated run draws the same samples.
        torch.manual_seed(input_key(first.ids) + first.draw)
        out: Any = lm.model.generate(  # type: ignore[operator]
            input_ids=ids.to(lm.device),
            attention_mask=real.to(lm.device),
            max_new_tokens=first.max_new_tokens,
            stopping_criteria=stop_sequences_criteria(tokenizer, until, longest, len(requests)),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            use_cache=True,
            **cache,
            **dict(first.options),
        )
    written = [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in out.tolist()]
    return [postprocess_generated_text(generation=text, stop=until, think_end_token=None) for text in written]
