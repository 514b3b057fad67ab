"""Forward passes through some layers of a decoder alone: what enters the first of them is given, what leaves is kept.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor
from transformers.cache_utils import Cache

from headscan.errors import InterventionError
from headscan.layers.blocks import Block


class RangePass:
    """What goes through a range of layers.

    Attributes:
        hidden_in: The hidden states that enter its first layer in the next pass (B, N, E); None: the model's own, from
            its embedding.
        hidden: What left its last layer in the last pass (B, N, E); None before it, and where the range ends with the
            model.
    """

    def __init__(self, first: int, last: int, hidden_in: Tensor | None) -> None:
        self.hidden_in = hidden_in
        self.hidden_out: Tensor | None = None
        self._first, self._last = first, last

    def replace_input(self, own: Tensor, cache: Cache | None) -> Tensor | None:
        """The hidden states that enter, in the place of the model's own.

        Raises:
            InterventionError: There are none, they are of another batch, or a KV cache is used.
        """
        if cache is not None:
            raise InterventionError(
                f"layers {self._first} to {self._last - 1} read whole inputs, without a KV cache: pass use_cache=False"
            )
        if self.hidden_in is None:
            if self._first > 0:
                raise InterventionError(
                    f"nothing is there to enter layer {self._first}: give the hidden states that left the layers below"
                )
            return None
        if self.hidden_in.shape != own.shape:
            raise InterventionError(
                f"hidden states {tuple(self.hidden_in.shape)} cannot enter layer {self._first} in the place of "
                f"{tuple(own.shape)}: give those of the same sequences"
            )
        return self.hidden_in.to(own.device)

    def keep_output(self, own: Tensor, _: Cache | None) -> None:
        """Keep what leaves."""
        self.hidden_out = own.detach()


@contextmanager
def running_range(
    blocks: Sequence[Block], first: int, last: int, hidden_in: Tensor | None = None
) -> Iterator[RangePass]:
    """Let forward passes run the blocks ``first`` to ``last - 1`` of a decoder and no others.

    A pass is called as a whole one is, with the same token ids: positions, masks and what else the blocks are told are
    the model's own. Where the range does not end with the model, what the pass gives is of no use.

    Args:
        blocks: All blocks of the model.
        first, last: The range; the block ``last`` does not run.
        hidden_in: What enters the first of them (B, N, E); None: the model's own hidden states.

    Yields:
        What goes in and out; ``hidden_in`` may be changed from pass to pass.
    """
    range_pass = RangePass(first, last, hidden_in)
    with ExitStack() as changes:
        for outside in (*blocks[:first], *blocks[last:]):
            changes.enter_context(outside.skipped())
        changes.enter_context(blocks[first].watched(range_pass.replace_input))
        if last < len(blocks):
            changes.enter_context(blocks[last].watched(range_pass.keep_output))
        yield range_pass
