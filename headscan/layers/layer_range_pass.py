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


class Passage:
    """What goes through a range of layers.

    Attributes:
        entering: The hidden states that enter its first layer in the next pass (B, N, E); None: the model's own, from
            its embedding.
        hidden: What left its last layer in the last pass (B, N, E); None before it, and where the range ends with the
            model.
    """

    def __init__(self, first: int, last: int, entering: Tensor | None) -> None:
        self.entering = entering
        self.hidden: Tensor | None = None
        self._first, self._last = first, last

    def enter(self, own: Tensor, cache: Cache | None) -> Tensor | None:
        """The hidden states that enter, in the place of the model's own.

        Raises:
            InterventionError: There are none, they are of another batch, or a KV cache is used.
        """
        if cache is not None:
            raise InterventionError(
                f"layers {self._first} to {self._last - 1} read whole inputs, without a KV cache: pass use_cache=False"
            )
        if self.entering is None:
            if self._first > 0:
                raise InterventionError(
                    f"nothing is there to enter layer {self._first}: give the hidden states that left the layers below"
                )
            return None
        if self.entering.shape != own.shape:
            raise InterventionError(
                f"hidden states {tuple(self.entering.shape)} cannot enter layer {self._first} in the place of "
                f"{tuple(own.shape)}: give those of the same sequences"
            )
        return self.entering.to(own.device)

    def leave(self, own: Tensor, _: Cache | None) -> None:
        """Keep what leaves."""
        self.hidden = own.detach()


@contextmanager
def passing(blocks: Sequence[Block], first: int, last: int, entering: Tensor | None = None) -> Iterator[Passage]:
    """Let forward passes run the blocks ``first`` to ``last - 1`` of a decoder and no others.

    A pass is called as a whole one is, with the same token ids: positions, masks and what else the blocks are told are
    the model's own. Where the range does not end with the model, what the pass gives is of no use.

    Args:
        blocks: All blocks of the model.
        first, last: The range; the block ``last`` does not run.
        entering: What enters the first of them (B, N, E); None: the model's own hidden states.

    Yields:
        What goes in and out; ``entering`` may be changed from pass to pass.
    """
    passage = Passage(first, last, entering)
    with ExitStack() as changes:
        for outside in (*blocks[:first], *blocks[last:]):
            changes.enter_context(outside.skipped())
        changes.enter_context(blocks[first].watched(passage.enter))
        if last < len(blocks):
            changes.enter_context(blocks[last].watched(passage.leave))
        yield passage
