"""Budgets of a plan: what is asked for, the number of windows that meets it, and the bytes that a plan saves."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headscan.catalog import head_count
from headscan.plans.plan_records import CHECKED, Count, Number, PlanError, PlanRecord, Positive, Share, SomeRows

#: Sequence lengths at which a plan reports saved KV bytes: 4k, 32k and 128k.
BUDGET_LENGTHS = (4096, 32768, 131072)


def budget_lengths(max_tokens: int | None) -> tuple[int, ...]:
    """Return the lengths at which a plan reports bytes, at most the model's ``max_tokens``; None for no limit."""
    if max_tokens is None:
        return BUDGET_LENGTHS
    return tuple(sorted({min(length, max_tokens) for length in BUDGET_LENGTHS}))


#: Returns the bytes of one sequence's cache with a number of windows, after a number of tokens.
BytesWith = Callable[[int, int], int]


@dataclass(frozen=True, config=CHECKED)
class WindowShare(PlanRecord):
    """Share of the candidates that get a window, rounded to the nearest count, at least one head or layer."""

    window_share: Annotated[Share, Field(gt=0)]
    kind: Literal["window_share"] = "window_share"
    lengths: ClassVar[tuple[int, ...]] = ()

    def window_count(self, counts: Sequence[int], bytes_with: BytesWith) -> int:
        """Return the number of candidates that get a window, of the possible ``counts``: ascending from 0 to all."""
        return _nearest(counts, min(head_count(self.window_share, counts[-1]), counts[-1]))


@dataclass(frozen=True, config=CHECKED)
class WindowHeads(PlanRecord):
    """Number of candidates that get a window; in a plan by layer, rounded to the nearest number of whole layers."""

    window_heads: Count
    kind: Literal["window_heads"] = "window_heads"
    lengths: ClassVar[tuple[int, ...]] = ()

    def window_count(self, counts: Sequence[int], bytes_with: BytesWith) -> int:
        """As `WindowShare.window_count`."""
        if self.window_heads > counts[-1]:
            raise PlanError(
                f"window_heads out of range: {self.window_heads} (limit {counts[-1]} candidates). Lower `window_heads`"
            )
        return _nearest(counts, self.window_heads)


def _nearest(counts: Sequence[int], windows: int) -> int:
    """Return the possible number of windows that is nearest to a wanted one, above 0 unless that is 0."""
    return min(counts[1:] if windows else [0], key=lambda count: (abs(count - windows), count))


@dataclass(frozen=True, config=CHECKED)
class KVBytes(PlanRecord):
    """Most bytes of one sequence's KV cache at ``tokens`` tokens."""

    kv_bytes: Positive
    tokens: Positive
    kind: Literal["kv_bytes"] = "kv_bytes"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sequence lengths at which a plan reports bytes, too."""
        return (self.tokens,)

    def window_count(self, counts: Sequence[int], bytes_with: BytesWith) -> int:
        """Return the smallest number of windows whose cache fits."""
        least = bytes_with(counts[-1], self.tokens)
        if least > self.kv_bytes:
            raise PlanError(
                f"budget out of reach: {self.kv_bytes} bytes at {self.tokens} tokens (limit {least}, the cache with"
                f" windows on all {counts[-1]} candidates). Raise `kv_bytes`, or narrow the windows"
            )
        # Bytes fall with the number of windows, so the negated bytes rise and can be bisected.
        at = bisect.bisect_left(counts[:-1], -self.kv_bytes, key=lambda count: -bytes_with(count, self.tokens))
        return counts[at]


BudgetRequest = Annotated[WindowShare | WindowHeads | KVBytes, Field(discriminator="kind")]


@dataclass(frozen=True, config=CHECKED)
class LossLimit(PlanRecord):
    """Budget: the most windows that add at most ``max_loss`` nats per scored token, on text and on each recall task.
    The prompts are those that rank the heads; on held-out prompts the increase may be larger.
    """

    max_loss: Annotated[Number, Field(gt=0)]

    def allows(self, increases: Mapping[str, float]) -> bool:
        return max(increases.values()) <= self.max_loss


@dataclass(frozen=True, config=CHECKED)
class LengthBudget(PlanRecord):
    """Bytes of one sequence's KV cache at ``tokens`` tokens, without and with the plan."""

    tokens: Positive
    kv_bytes: Count
    planned_bytes: Count
    saved_bytes: Count
    saved_share: Share

    def __post_init__(self) -> None:
        if self.saved_bytes != self.kv_bytes - self.planned_bytes:
            raise PlanError(
                f"saved bytes at {self.tokens} tokens are {self.saved_bytes} (limit {self.kv_bytes} minus"
                f" {self.planned_bytes}). Make the plan again"
            )


@dataclass(frozen=True, config=CHECKED)
class Budget(PlanRecord):
    """Savings of a plan, as a share of KV heads and of KV bytes by sequence length.

    Attributes:
        request: Budget that was asked for.
        kv_heads: All KV heads of the model.
        window_share: ``window_heads`` over ``kv_heads``.
        dropped_heads: KV heads without any cache.
        lengths: Bytes by length, those of the request included; at least one.
    """

    request: BudgetRequest
    kv_heads: Count
    window_heads: Count
    window_share: Share
    dropped_heads: Count
    lengths: SomeRows[LengthBudget]
