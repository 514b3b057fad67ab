"""Patterns of other tools: a number per head, high = keeps its full cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headscan.analysis.plans.format.calibrations import PatternFormat
from headscan.analysis.plans.format.plan_records import PlanError, PlannedModel

#: Values below it stand for window heads if a pattern states no sparsity; DuoAttention and PruLong use the same.
THRESHOLD = 0.5


@dataclass(frozen=True)
class HeadPattern:
    """Numbers of a pattern file, with its settings.

    Attributes:
        format: Tool that reads and writes the file.
        path: The file, and ``sha256`` its hash.
        values: (layers, heads) as in the file, turned around if ``inverted``: high = keeps its full cache.
        heads: What a column stands for.
        sink_size: First tokens of a window head; None if not stated, as for ``recent_size``.
        sparsity: Share of window heads; None if not stated.
        inverted: Low numbers keep the full cache in the file.
        notes: Doubts about the numbers.
    """

    format: PatternFormat
    path: str
    sha256: str
    values: np.ndarray
    heads: Literal["kv_head", "query_head"]
    sink_size: int | None = None
    recent_size: int | None = None
    sparsity: float | None = None
    inverted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def keep(self) -> np.ndarray:
        """Numbers clipped to 0 to 1, as consumers do."""
        return np.clip(self.values, 0, 1)

    @property
    def binary(self) -> bool:
        """True if all numbers are 0 or 1."""
        return bool(np.isin(self.keep, (0, 1)).all())

    @property
    def stated_window_heads(self) -> int | None:
        """Number of window heads by the stated sparsity, as consumers cut at its quantile; None if not stated."""
        if self.sparsity is None:
            return None
        if self.sparsity >= 1:
            return self.values.size
        return math.ceil((self.values.size - 1) * self.sparsity - 1e-9)

    def for_model(self, model: PlannedModel) -> dict[tuple[int, int], float]:
        """Return the number of each (layer, KV head); a KV head gets the largest of its query heads.

        Raises:
            PlanError: The model has other layers or heads.
        """
        rows, columns = self.values.shape
        kinds = {(layer.num_attention_heads, layer.num_key_value_heads) for layer in model.layers}
        per_layer = " and ".join(f"{queries} query and {kvs} KV heads" for queries, kvs in sorted(kinds))
        expected = {queries if self.heads == "query_head" else kvs for queries, kvs in kinds}
        if [layer.layer for layer in model.layers] != list(range(rows)) or expected != {columns}:
            unit = self.heads.replace("_", " ").replace("kv", "KV")
            raise PlanError(
                f"{self.path} has {rows} layers of {columns} {unit}s, but {model.name} has {model.num_layers} layers,"
                f" {len(model.layers)} of them with attention of {per_layer}. Import a pattern of this model"
            )
        found: dict[tuple[int, int], float] = {}
        for layer in model.layers:
            groups = self.values[layer.layer].reshape(layer.num_key_value_heads, -1).max(1)
            found |= {(layer.layer, kv_head): float(value) for kv_head, value in enumerate(groups)}
        return found


def checked_polarity(pattern: HeadPattern, inverted: bool | None) -> HeadPattern:
    """Return a pattern read as in its file with high = keeps its full cache.

    The count of low numbers shows the polarity where the pattern states its sparsity, which is the share of window
    heads; so does a stated window that no head would use.

    Args:
        inverted: True turns the numbers around; False trusts them; None checks them.

    Raises:
        PlanError: The numbers fit the stated sparsity or window only if low numbers keep the full cache.
    """
    if inverted:
        return replace(pattern, values=1 - pattern.values, inverted=True)
    if inverted is False or pattern.heads == "query_head":
        return pattern
    total = pattern.values.size
    low = int((pattern.values < THRESHOLD).sum())
    ways = "`inverted=True` if low numbers keep the full cache, or with `inverted=False` if the numbers are right"
    stated = pattern.stated_window_heads
    if stated is None:
        if pattern.binary and low == 0 and pattern.recent_size:
            raise PlanError(
                f"inverted polarity: all {total} heads of {pattern.path} have 1, so none would use its window of"
                f" {pattern.sink_size} + {pattern.recent_size} tokens. Import it with {ways}"
            )
        return pattern
    # Tools round the share to a count in different ways.
    fits, inverse_fits = abs(low - stated) <= 1, abs(total - low - stated) <= 1
    if inverse_fits and not fits:
        raise PlanError(
            f"inverted polarity: {low} of {total} heads of {pattern.path} are low, but it states sparsity"
            f" {pattern.sparsity:g}, that is {stated} window heads, which is the number of high ones. Import it with"
            f" {ways}"
        )
    if pattern.binary and not fits:
        doubt = f"{low} of {total} heads of the pattern are 0, but it states sparsity {pattern.sparsity:g}"
        return replace(pattern, notes=(*pattern.notes, doubt))
    return pattern
