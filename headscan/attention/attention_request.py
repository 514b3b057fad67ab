"""Requests to attention calls: which statistics, of which tokens.

Shapes: B sequences, N queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscan.catalog import MassWidths
from headscan.errors import InterventionError

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
            `registry.CONTINUABLE` can be measured, over the queries of the call.
    """

    statistics: frozenset[str]
    lengths: Tensor
    key_lengths: Tensor
    widths: MassWidths
    path: str = "auto"
    ignored_keys: Tensor | None = None
    past: int = 0

    def __post_init__(self) -> None:
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
