"""Budgets of a plan: requests, and the savings that they give."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal, Protocol

from headscan.analysis.plans.plan_records import PlanError

#: Sequence lengths at which a plan reports saved KV bytes: 4k, 32k and 128k.
BUDGET_LENGTHS = (4096, 32768, 131072)


def budget_lengths(max_tokens: int | None) -> tuple[int, ...]:
    """Return the lengths at which the plan of a model reports bytes.

    Args:
        max_tokens: The model's positions, which take the place of lengths beyond them; None for no limit.
    """
    if max_tokens is None:
        return BUDGET_LENGTHS
    return tuple(sorted({min(length, max_tokens) for length in BUDGET_LENGTHS}))


class Ladder(Protocol):
    """Candidates in the order in which they get a window."""

    @property
    def candidates(self) -> int:
        """Number of KV heads that can get a window."""
        ...

    def bytes_with(self, windows: int, tokens: int) -> int:
        """Return the bytes of one sequence's cache if the first ``windows`` candidates get a window."""
        ...


@dataclass(frozen=True)
class WindowShare:
    """Share of the candidates that get a window, rounded to the nearest count, at least one head."""

    window_share: float
    kind: Literal["window_share"] = "window_share"

    def __post_init__(self) -> None:
        if not 0 < self.window_share <= 1:
            raise PlanError(
                f"window_share out of range: {self.window_share:g} (limit above 0, at most 1). Change `window_share`"
            )

    def window_count(self, ladder: Ladder) -> int:
        """Return the number of candidates that get a window."""
        return min(max(1, math.floor(self.window_share * ladder.candidates + 0.5)), ladder.candidates)

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths that the request names."""
        return ()


@dataclass(frozen=True)
class WindowHeads:
    """Number of candidates that get a window."""

    window_heads: int
    kind: Literal["window_heads"] = "window_heads"

    def __post_init__(self) -> None:
        if self.window_heads < 0:
            raise PlanError(f"window_heads out of range: {self.window_heads} (limit at least 0). Raise `window_heads`")

    def window_count(self, ladder: Ladder) -> int:
        """Return the number of candidates that get a window."""
        if self.window_heads > ladder.candidates:
            raise PlanError(
                f"window_heads out of range: {self.window_heads} (limit {ladder.candidates} candidates). Lower"
                " `window_heads`"
            )
        return self.window_heads

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths that the request names."""
        return ()


@dataclass(frozen=True)
class KVBytes:
    """Most bytes of one sequence's KV cache at ``tokens`` tokens."""

    kv_bytes: int
    tokens: int
    kind: Literal["kv_bytes"] = "kv_bytes"

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} out of range: {getattr(self, name)} (limit at least 1). Raise `{name}`")

    def window_count(self, ladder: Ladder) -> int:
        """Return the smallest number of windows whose cache fits."""
        least = ladder.bytes_with(ladder.candidates, self.tokens)
        if least > self.kv_bytes:
            raise PlanError(
                f"budget out of reach: {self.kv_bytes} bytes at {self.tokens} tokens (limit {least}, the cache with"
                f" windows on all {ladder.candidates} candidates). Raise `kv_bytes`, or narrow the windows"
            )
        # Bytes fall with the number of windows, so the negated bytes rise and can be bisected.
        return bisect.bisect_left(
            range(ladder.candidates), -self.kv_bytes, key=lambda count: -ladder.bytes_with(count, self.tokens)
        )

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths that the request names."""
        return (self.tokens,)


BudgetRequest = WindowShare | WindowHeads | KVBytes


@dataclass(frozen=True)
class LengthBudget:
    """Bytes of one sequence's KV cache at ``tokens`` tokens, without and with the plan."""

    tokens: int
    kv_bytes: int
    planned_bytes: int
    saved_bytes: int
    saved_share: float

    def __post_init__(self) -> None:
        whole = self.tokens >= 1 and 0 <= self.planned_bytes <= self.kv_bytes
        if not whole or self.saved_bytes != self.kv_bytes - self.planned_bytes or not 0 <= self.saved_share <= 1:
            raise PlanError(
                f"bytes at {self.tokens} tokens: {self.kv_bytes}, planned {self.planned_bytes}, saved"
                f" {self.saved_bytes}, a share of {self.saved_share:g} (limit whole minus planned). Make the plan again"
            )


@dataclass(frozen=True)
class Budget:
    """Savings of a plan, as a share of KV heads and of KV bytes by sequence length.

    Attributes:
        request: Budget that was asked for.
        kv_heads: All KV heads of the model.
        window_share: ``window_heads`` over ``kv_heads``.
        dropped_heads: KV heads without any cache.
        lengths: Bytes by length, those of the request included; at least one.
    """

    request: BudgetRequest
    kv_heads: int
    window_heads: int
    window_share: float
    dropped_heads: int
    lengths: tuple[LengthBudget, ...]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise PlanError("lengths of the budget: 0 entries (limit at least 1). Make the plan again")
        if not 0 <= self.window_share <= 1:
            raise PlanError(f"window_share of the budget is {self.window_share:g} (limit 0 to 1). Make the plan again")
