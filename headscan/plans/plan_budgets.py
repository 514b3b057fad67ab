"""Budgets of a plan: what is asked for, the number of windows that meets it, and the bytes that a plan saves."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headscan.catalog import head_count, kept_by_window, whole_blocks
from headscan.plans.plan_records import (
    CHECKED,
    Count,
    Granularity,
    PlanError,
    PlannedModel,
    PlanRecord,
    Positive,
    Share,
    SomeRows,
)

#: Sequence lengths at which a plan reports saved KV bytes: 4k, 32k and 128k.
BUDGET_LENGTHS = (4096, 32768, 131072)


def budget_lengths(max_tokens: int | None) -> tuple[int, ...]:
    """Return the lengths at which a plan reports bytes, at most the model's ``max_tokens``; None for no limit."""
    if max_tokens is None:
        return BUDGET_LENGTHS
    return tuple(sorted({min(length, max_tokens) for length in BUDGET_LENGTHS}))


class WindowSteps:
    """Numbers of windows that a plan can have, ascending from 0 (``counts``): all up to that of the candidates, or
    those of whole layers; and the bytes of the cache with each.
    """

    def __init__(
        self,
        model: PlannedModel,
        order: Sequence[tuple[int, int]],
        widths: Mapping[tuple[int, int], tuple[int, int]],
        dropped: Mapping[tuple[int, int], str],
        granularity: Granularity = "kv_head",
        block: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.counts = [0]
        for at, place in enumerate(order):
            if granularity == "kv_head" or at + 1 == len(order) or order[at + 1][0] != place[0]:
                self.counts.append(at + 1)
        self._model = model
        self._order = order
        self._widths = widths
        self._dropped = dropped
        self._block, self._chunk = block, chunk
        self._bytes = {layer.layer: layer.kv_bytes or 0 for layer in model.layers}

    @property
    def candidates(self) -> int:
        """Number of KV heads that can get a window."""
        return len(self._order)

    def nearest(self, windows: int) -> int:
        """Return the possible number of windows that is nearest to a wanted one, above 0 unless that is 0."""
        possible = self.counts[1:] if windows else [0]
        return min(possible, key=lambda count: (abs(count - windows), count))

    def bytes_with(self, windows: int, tokens: int) -> int:
        """Return the bytes of one sequence's cache if the first ``windows`` candidates get a window."""
        whole = self._model.cache_bytes(tokens, self._block)
        held = whole_blocks(tokens, self._block)
        gone = sum(held * self._bytes[layer] for layer, _ in self._dropped)
        saved = sum(
            (held - kept_by_window(tokens, *self._widths[place], self._block, self._chunk)) * self._bytes[place[0]]
            for place in self._order[:windows]
        )
        return whole - gone - saved


class _WindowRequest(PlanRecord):
    """A budget that names no sequence lengths."""

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths that the request names."""
        return ()


@dataclass(frozen=True, config=CHECKED)
class WindowShare(_WindowRequest):
    """Share of the candidates that get a window, rounded to the nearest count, at least one head or layer."""

    window_share: Annotated[Share, Field(gt=0)]
    kind: Literal["window_share"] = "window_share"

    def window_count(self, steps: WindowSteps) -> int:
        """Return the number of candidates that get a window."""
        return steps.nearest(min(head_count(self.window_share, steps.candidates), steps.candidates))


@dataclass(frozen=True, config=CHECKED)
class WindowHeads(_WindowRequest):
    """Number of candidates that get a window; in a plan by layer, rounded to the nearest number of whole layers."""

    window_heads: Count
    kind: Literal["window_heads"] = "window_heads"

    def window_count(self, steps: WindowSteps) -> int:
        """Return the number of candidates that get a window."""
        if self.window_heads > steps.candidates:
            raise PlanError(
                f"window_heads out of range: {self.window_heads} (limit {steps.candidates} candidates). Lower"
                " `window_heads`"
            )
        return steps.nearest(self.window_heads)


@dataclass(frozen=True, config=CHECKED)
class KVBytes(PlanRecord):
    """Most bytes of one sequence's KV cache at ``tokens`` tokens."""

    kv_bytes: Positive
    tokens: Positive
    kind: Literal["kv_bytes"] = "kv_bytes"

    def window_count(self, steps: WindowSteps) -> int:
        """Return the smallest number of windows whose cache fits."""
        least = steps.bytes_with(steps.candidates, self.tokens)
        if least > self.kv_bytes:
            raise PlanError(
                f"budget out of reach: {self.kv_bytes} bytes at {self.tokens} tokens (limit {least}, the cache with"
                f" windows on all {steps.candidates} candidates). Raise `kv_bytes`, or narrow the windows"
            )
        # Bytes fall with the number of windows, so the negated bytes rise and can be bisected.
        return steps.counts[
            bisect.bisect_left(
                steps.counts[:-1], -self.kv_bytes, key=lambda count: -steps.bytes_with(count, self.tokens)
            )
        ]

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths that the request names."""
        return (self.tokens,)


BudgetRequest = Annotated[WindowShare | WindowHeads | KVBytes, Field(discriminator="kind")]


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
