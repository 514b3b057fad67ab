"""Trying whether a model's forward passes can begin at a layer: a pass that does has to end as a whole one.

Shapes: B sequences, N tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headscan.layers.blocks import Blocks, short_text
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_means import wide_norm

#: Tokens of the text that is read, and how many of them a KV cache remembers.
_TOKENS, _REMEMBERED = 8, 3


@torch.no_grad()
def cannot_resume(blocks: Blocks, layers: Iterable[int] | None = None) -> dict[int, str]:
    """At which of these layers forward passes cannot begin, and why not; empty where all of them will do.

    From block to block a model may pass more than hidden states (keys and values that later layers borrow, say), to
    all of its layers or to some. That is tried, not looked up: short passes that begin at a layer have to end in the
    logits of whole ones, without a KV cache and going on from one. Each layer costs two of them.

    Call it while no head is ablated.

    Args:
        blocks: What `find_blocks` found.
        layers: Layers to try; None: all.

    Raises:
        HeadIndexError: There is no such layer.
    """
    wanted = set(range(len(blocks.all)) if layers is None else layers)
    for layer in wanted:
        blocks.at(layer)
    reasons: dict[int, str] = {}
    for way, remembered in (("without a KV cache", 0), ("that goes on from a KV cache", _REMEMBERED)):
        try:
            wrong = _ending_otherwise(blocks, wanted, remembered)
        except Exception as problem:  # of a whole pass
            wrong = dict.fromkeys(wanted, _breaks_off(problem))
        for layer, what in wrong.items():
            reasons.setdefault(layer, f"a pass {way} {what}")
    return reasons


def _ending_otherwise(blocks: Blocks, layers: set[int], remembered: int) -> dict[int, str]:
    """At which layers a pass begins and does not end as a whole one, and what it does."""
    read, text = _reader(blocks.lm, remembered), short_text(blocks.lm, _TOKENS)
    with blocks.keep_inputs(layers) as kept:
        whole = read(text)
    # A kernel may not give the same twice.
    bound = 4 * (wide_norm(read(text) - whole) + torch.finfo(whole.dtype).eps * wide_norm(whole))
    # What a block keeps in secret for a higher one is another text's now, and stays so: the highest layer comes first.
    read(text.flip(0))
    wrong: dict[int, str] = {}
    for layer in sorted(layers, reverse=True):
        try:
            with blocks.resuming_at(layer, kept[layer]):
                error = wide_norm(read(text) - whole)
        except Exception as problem:
            wrong[layer] = _breaks_off(problem)
        else:
            if not error <= bound:
                wrong[layer] = f"gives logits that differ by {float(error / wide_norm(whole)):.1%} from a whole one's"
    return wrong


def _reader(lm: LoadedModel, remembered: int) -> Callable[[Tensor], Tensor]:
    """A pass over ids (B, N) whose first tokens a KV cache remembers: it gives the others' logits, always the same."""
    if not remembered:
        return lambda ids: lm.model(input_ids=ids, use_cache=False).logits
    first = short_text(lm, _TOKENS)[:, :remembered]
    past = lm.model(input_ids=first, use_cache=True).past_key_values

    def read_on(ids: Tensor) -> Tensor:
        rest, cache = ids[:, remembered:], copy.deepcopy(past)
        logits: Tensor = lm.model(input_ids=rest, past_key_values=cache, use_cache=True).logits
        return logits

    return read_on


def _breaks_off(problem: Exception) -> str:
    line = (str(problem).strip().splitlines() or [""])[0]
    return f"breaks off: {type(problem).__name__}: {line}"
