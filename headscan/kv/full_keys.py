"""Keys and values of KV heads that keep every token.

Shapes: B sequences, N new tokens, S tokens so far, K KV heads, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

#: Tokens by which a buffer grows, so that it is copied once in so many steps.
GROWTH = 256


class FullKeys:
    """A buffer of keys and one of values, allocated ahead: adding a token copies nothing else.

    Attributes:
        tokens: Tokens held (S).

    Args:
        max_tokens: Tokens to allocate at once; None grows in steps.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor:
        """Keys (B, K, S, D)."""
        assert self._buffers is not None
        return self._buffers[0][:, :, : self.tokens]

    @property
    def values(self) -> Tensor:
        """Values (B, K, S, Dv)."""
        assert self._buffers is not None
        return self._buffers[1][:, :, : self.tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held; the buffers may have room for more."""
        return 0 if self._buffers is None else self.keys.nbytes + self.values.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self._buffers is None else sum(buffer.nbytes for buffer in self._buffers)

    def add(self, key_BKND: Tensor, value_BKND: Tensor) -> None:
        """Append the keys and values of new tokens."""
        end = self.tokens + key_BKND.shape[2]
        room = 0 if self._buffers is None else self._buffers[0].shape[2]
        if room < end:
            size = -(-end // GROWTH) * GROWTH
            if self._max_tokens is not None and end <= self._max_tokens:
                size = self._max_tokens
            self._buffers = (self._grown(0, key_BKND, size), self._grown(1, value_BKND, size))
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_BKND, value_BKND), strict=True):
            buffer[:, :, self.tokens : end] = new
        self.tokens = end

    def crop(self, tokens: int) -> None:
        """Remove the last tokens."""
        self.tokens -= tokens

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer by the result of ``change``, which selects or repeats rows."""
        if self._buffers is not None:
            key, value = self._buffers
            self._buffers = (change(key), change(value))

    def _grown(self, which: int, like: Tensor, size: int) -> Tensor:
        B, K, _, D = like.shape
        buffer = like.new_empty(B, K, size, D)
        if self._buffers is not None:
            buffer[:, :, : self.tokens] = self._buffers[which][:, :, : self.tokens]
        return buffer
