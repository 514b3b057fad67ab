"""Checks that a pass resumed at a layer reproduces a whole pass.

Shapes: B sequences, N tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from headscan.layers.blocks import Blocks, short_text
from headscan.layers.layer_range_pass import resuming_at
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_errors import MODEL_ERRORS, first_line, raise_if_out_of_memory
from headscan.models.token_means import wide_norm

#: Tokens of the short text, and how many of them are read into a KV cache first.
_TOKENS, _CACHED = 8, 3


class WholePass:
    """The output of a whole pass, with a tolerance.

    Attributes:
        out: The output.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.out = read()
        # Kernels may not be deterministic: the tolerance covers the difference between two equal passes.
        noise = wide_norm(read() - self.out)
        self._bound = 4 * (noise + torch.finfo(self.out.dtype).eps * wide_norm(self.out))

    def difference(self, read: Callable[[], Tensor]) -> str | None:
        """Return how another pass fails or differs; None if it is equal.

        Raises:
            RuntimeError: The pass ran out of memory.
        """
        try:
            error = wide_norm(read() - self.out)
        except MODEL_ERRORS as problem:
            return failure(problem)
        if error <= self._bound:
            return None
        return f"differs by {float(error / wide_norm(self.out)):.1%} from a whole pass"


def failure(problem: Exception) -> str:
    """Return how a pass failed.

    Raises:
        RuntimeError: It ran out of memory.
    """
    raise_if_out_of_memory(problem)
    return f"fails: {first_line(problem)}"


@torch.no_grad()
def cannot_resume(
    blocks: Blocks, layers: Iterable[int] | None = None, *, behind_attention: bool = False
) -> dict[int, str]:
    """Return the layers at which passes cannot resume, with the reasons.

    Blocks may pass on more than hidden states (keys and values that later layers share, for example). Short passes
    that resume at each layer are compared with whole ones, without a KV cache and with one: two passes a layer.

    Call it while no head is ablated.

    Args:
        blocks: The result of `find_blocks`.
        layers: Layers to check; None checks all.
        behind_attention: Passes have the outputs of the layer's heads, too (`Blocks.with_heads`).

    Raises:
        HeadIndexError: There is no such layer.
        RuntimeError: A pass ran out of memory.
    """
    wanted = set(range(len(blocks.all)) if layers is None else layers)
    for layer in wanted:
        blocks.at(layer)
    reasons: dict[int, str] = {}
    for way, cached in (("without a KV cache", 0), ("with a KV cache", _CACHED)):
        try:
            wrong = _differences(blocks, wanted, cached, behind_attention)
        except MODEL_ERRORS as problem:  # of a whole pass
            wrong = dict.fromkeys(wanted, failure(problem))
        for layer, what in wrong.items():
            reasons.setdefault(layer, f"a pass {way} {what}")
    return reasons


def _differences(blocks: Blocks, layers: set[int], cached: int, behind_attention: bool) -> dict[int, str]:
    """Return the layers at which a resumed pass differs, and how."""
    read, text = _reader(blocks.lm, cached), short_text(blocks.lm, _TOKENS)
    with blocks.keep_inputs(layers) as kept, blocks.keep_heads(layers) as heads:
        whole = WholePass(lambda: read(text))
    # Hidden state that blocks share now belongs to another text. The highest layer comes first, so that no lower
    # block writes it again.
    read(text.flip(0))
    wrong: dict[int, str] = {}
    for layer in sorted(layers, reverse=True):
        if behind_attention and not (layer in blocks.attention and layer in heads):
            wrong[layer] = "cannot skip its attention"
            continue
        attention = blocks.with_heads(layer, heads[layer]) if behind_attention else nullcontext()
        with resuming_at(blocks, layer, kept[layer]), attention:
            difference = whole.difference(lambda: read(text))
        if difference is not None:
            wrong[layer] = difference
    return wrong


def _reader(lm: LoadedModel, cached: int) -> Callable[[Tensor], Tensor]:
    """Return a pass over ids (B, N) that continues a KV cache.

    It returns the logits of the tokens after the cached ones.
    """
    if not cached:
        return lambda ids: lm.model(input_ids=ids, use_cache=False).logits
    first = short_text(lm, _TOKENS)[:, :cached]
    past = lm.model(input_ids=first, use_cache=True).past_key_values

    def read_on(ids: Tensor) -> Tensor:
        rest, cache = ids[:, cached:], copy.deepcopy(past)
        logits: Tensor = lm.model(input_ids=rest, past_key_values=cache, use_cache=True).logits
        return logits

    return read_on
