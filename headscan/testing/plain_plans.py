"""KV-cache plans without evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlainHead:
    """An entry of a plan: a KV head that keeps all keys (``full``), a ``window`` or nothing (``drop``)."""

    layer: int
    kv_head: int
    action: str
    sink: int | None = None
    recent: int | None = None

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` tokens the head keeps."""
        if self.action == "full":
            return tokens
        return min(tokens, (self.sink or 0) + (self.recent or 0))


@dataclass(frozen=True)
class PlainPlan:
    """A plan for `PlanCache` and `KeptKeys`."""

    heads: tuple[PlainHead, ...]

    def bytes(self, rows: int, tokens: int, token_bytes: int) -> int:
        """Return the bytes of a cache; ``token_bytes`` are those of one token's key and value in one head."""
        return rows * token_bytes * sum(head.kept_tokens(tokens) for head in self.heads)
