"""Requests to attention calls: which statistics, of which tokens.

Shapes: B sequences, N queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.errors import InterventionError
from headscan.statistics.registry import CONTINUABLE, EXPLICIT, WEIGHT_STATISTICS

PATHS = ("auto", "fused", "blockwise")


@dataclass(frozen=True)
class Geometry:
    """Numbers of queries and keys of a call, and their visibility.

    Attributes:
        queries: N.
        keys: S.
        causal: No query sees a later key.
        cross: The keys belong to another sequence.
    """

    queries: int
    keys: int
    causal: bool
    cross: bool


@dataclass(frozen=True)
class MassWidths:
    """Widths of sink and recent mass, in keys.

    Attributes:
        sink: Number of first keys that form the sink.
        recent: Number of last keys, up to the query's own, that are recent.

    Raises:
        InterventionError: A width below 1.
    """

    sink: int = DEFAULT_SINK
    recent: int = DEFAULT_RECENT

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            if getattr(self, name) < 1:
                raise InterventionError(f"width is too small: {name}={getattr(self, name)} (limit 1). Give at least 1")


@dataclass(frozen=True)
class AttentionRequest:
    """The statistics to measure in one attention call.

    Attributes:
        statistics: Names of statistics and profiles that the attention hook measures.
        lengths: Real queries of each sequence (B,).
        key_lengths: Real keys (B,); equal to ``lengths`` except in cross attention.
        widths: Widths of sink and recent mass.
        path: ``fused``, ``blockwise``, or ``auto``, which takes fused kernels if they support the call.
        ignored_keys: bool (B, S), keys that ``confidence`` leaves out; None leaves out none.
        past: Number of keys before the first query's own, from a KV cache. With a past only the statistics in
            `CONTINUABLE` can be measured, over the queries of the call.

    Raises:
        InterventionError: An unknown path, or a statistic that cannot be measured with a past.
    """

    statistics: frozenset[str]
    lengths: Tensor
    key_lengths: Tensor
    widths: MassWidths
    path: str = "auto"
    ignored_keys: Tensor | None = None
    past: int = 0

    def __post_init__(self) -> None:
        if self.past and (whole := sorted(self.statistics - CONTINUABLE)):
            raise InterventionError(
                f"{', '.join(whole)} cannot be computed after {self.past} cached tokens. Pass whole sequences"
            )
        if self.path not in PATHS:
            raise InterventionError(f"unknown attention path {self.path!r}. Choose one of {', '.join(PATHS)}")

    def on(self, device: torch.device) -> AttentionRequest:
        """Return the request with its tensors on ``device``."""
        if self.lengths.device == device:
            return self
        ignored = None if self.ignored_keys is None else self.ignored_keys.to(device)
        return replace(
            self, lengths=self.lengths.to(device), key_lengths=self.key_lengths.to(device), ignored_keys=ignored
        )

    @property
    def explicit(self) -> bool:
        """True if a statistic needs explicit weights."""
        return bool(self.statistics & EXPLICIT)

    @property
    def per_query(self) -> frozenset[str]:
        """Names of the numbers per query that the statistics need."""
        measured = self.statistics & WEIGHT_STATISTICS.keys()
        return frozenset(number.name for name in measured for number in WEIGHT_STATISTICS[name].query_numbers)
