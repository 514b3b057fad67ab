"""Forward passes through some layers, passes that resume at one, and the check that they reproduce a whole pass.

The blocks outside the range return their input, so embeddings, positions, masks, the final norm and the head stay the
model's own, in every family.

Shapes: B sequences, N tokens, E width of a hidden state, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headscan.errors import InterventionError
from headscan.layers.blocks import Blocks, short_text
from headscan.models.decoder_block import Block
from headscan.models.forward_inputs import wide_norm
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_class import MODEL_ERRORS, first_line, raise_if_out_of_memory


class RangePass:
    """The hidden states at both ends of a range of layers.

    Attributes:
        hidden_in: Input of the first layer in the next pass (B, N, E); None uses the output of the model's embedding.
            Set it again when the batch changes.
        hidden_out: Output of the last layer in the last pass (B, N, E); None before that pass, and if the range ends
            with the model.
    """

    def __init__(self, first: int, hidden_in: Tensor | None, check_cache: Callable[[Cache], None]) -> None:
        self.hidden_in = hidden_in
        self.hidden_out: Tensor | None = None
        self._first, self._check_cache = first, check_cache

    def replace_input(self, own: Tensor, cache: Cache | None) -> Tensor | None:
        """Return the hidden states that replace the first layer's input.

        Raises:
            InterventionError: They are missing or belong to another batch, or the KV cache cannot be used.
        """
        if cache is not None:
            self._check_cache(cache)
        if self.hidden_in is None:
            if self._first > 0:
                raise InterventionError(
                    f"no hidden states for layer {self._first}: None. Pass the hidden states that left layer "
                    f"{self._first - 1}"
                )
            return None
        if self.hidden_in.shape != own.shape:
            raise InterventionError(
                f"hidden states for layer {self._first} belong to another batch: {tuple(self.hidden_in.shape)} instead "
                f"of {tuple(own.shape)}. Pass those of the same sequences"
            )
        return self.hidden_in.to(own.device)

    def keep_output(self, own: Tensor, _: Cache | None) -> None:
        """Keep the hidden states that leave the last layer."""
        self.hidden_out = own.detach()


def running_range(
    blocks: Sequence[Block], first: int, last: int, hidden_in: Tensor | None = None
) -> AbstractContextManager[RangePass]:
    """Restrict forward passes to the blocks ``first`` to ``last - 1`` of a decoder.

    Call the model as for a whole pass, with the same token ids and without a KV cache. If the range does not end with
    the model, ignore the model's output.

    Args:
        blocks: All blocks of the model.
        first, last: The range; the block ``last`` does not run.
        hidden_in: Input of the first block (B, N, E); None uses the output of the model's embedding.

    Yields:
        Input and output of the range; its ``hidden_in`` may change between passes.

    Raises:
        InterventionError: In a pass: ``hidden_in`` is missing or belongs to another batch, or a KV cache is used.
    """

    def refuse(_: Cache) -> None:
        raise InterventionError(f"layers {first} to {last - 1} cannot use a KV cache. Call them with use_cache=False")

    return _running(blocks, first, last, hidden_in, refuse)


def resuming_at(blocks: Blocks, layer: int, hidden: Tensor) -> AbstractContextManager[RangePass]:
    """Resume forward passes at a layer, whose input is ``hidden``.

    The blocks below do not run.

    Call the model as for a whole pass, with the same token ids. A KV cache has to be filled by whole passes; a resumed
    pass adds to it from this layer on, so the cache cannot be used again. `cannot_resume` reports the
    layers at which a model cannot resume.

    Args:
        layer: The first block that runs.
        hidden: Its input (B, N, E), as `Blocks.keep_inputs` keeps it.

    Yields:
        The pass; its ``hidden_in`` may change between passes.

    Raises:
        HeadIndexError: There is no such layer.
        InterventionError: In a pass: ``hidden`` belongs to another batch, or the KV cache was not filled by whole
            passes.
    """
    blocks.at(layer)
    first, *others = (site.layer for site in blocks.lm.grid.sites)
    # A model takes the number of past tokens from its first layer; positions and masks of all layers follow from it.
    attending = [first, *(other for other in others if other >= layer)]

    def check_past(cache: Cache) -> None:
        memories = [cache.layers[each] for each in attending if each < len(cache)]
        # A layer that shares another layer's keys has no cache of its own.
        past = {int(memory.get_seq_length()) for memory in memories if isinstance(memory, CacheLayerMixin)}
        if len(past) > 1:
            raise InterventionError(
                f"the KV cache holds {min(past)} tokens in some layers and {max(past)} in others: cannot resume at "
                f"layer {layer}. Pass a cache filled by whole passes, once"
            )

    return _running(blocks.all, layer, len(blocks.all), hidden, check_past)


@contextmanager
def _running(
    blocks: Sequence[Block], first: int, last: int, hidden_in: Tensor | None, check_cache: Callable[[Cache], None]
) -> Iterator[RangePass]:
    range_pass = RangePass(first, hidden_in, check_cache)
    with ExitStack() as changes:
        for outside in (*blocks[:first], *blocks[last:]):
            changes.enter_context(outside.skipped())
        changes.enter_context(blocks[first].watched(range_pass.replace_input))
        if last < len(blocks):
            changes.enter_context(blocks[last].watched(range_pass.keep_output))
        yield range_pass


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
