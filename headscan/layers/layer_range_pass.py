"""Forward passes through some layers, and passes that resume at one.

The blocks outside the range return their input, so embeddings, positions, masks, the final norm and the head stay the
model's own, in every family.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headscan.errors import InterventionError
from headscan.layers.blocks import Blocks
from headscan.models.decoder_block import Block


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
    pass adds to it from this layer on, so the cache cannot be used again. `resume_check.cannot_resume` reports the
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
