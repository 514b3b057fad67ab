"""Records of a head plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What the KV cache of a layer holds. ``full``: a key and a value of every token for each KV head. ``sliding``: the
#: same of the last tokens alone, by a window or in chunks. ``latent``: one vector a token for all heads (MLA).
#: ``shared``: nothing, because the layer reads the cache of an earlier one. ``uncached``: nothing, as in encoders.
LayerType = Literal["full", "sliding", "latent", "shared", "uncached"]


HeadClass = Literal["retrieval", "streaming", "protected"]


HeadAction = Literal["full", "window"]


@dataclass(frozen=True)
class PlannedLayer:
    """The self-attention of one layer.

    Attributes:
        layer: Index in the model, from 0; layers without attention are left out.
        type: What its KV cache holds, see `LayerType`; only ``full`` layers can be given windows.
        head_dim: Width of a key vector.
        value_dim: Width of a value vector.
        sliding_window: Keys that a query sees; None if unbounded.
        cache_bytes_per_token: Bytes of one token in the layer's KV cache, all heads together.
        cache_tokens: Most tokens that the cache keeps; None for no limit.
        kv_bytes: Bytes of one token's key and value in one KV head; None if heads have no cache of their own.
        kv_shared_from: Layer whose cache is read; None if the layer has its own.
    """

    layer: int
    type: LayerType
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    cache_bytes_per_token: int
    cache_tokens: int | None
    kv_bytes: int | None
    kv_shared_from: int | None

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the layer's cache after ``tokens`` tokens of one sequence."""
        return self.cache_bytes_per_token * (tokens if self.cache_tokens is None else min(tokens, self.cache_tokens))


@dataclass(frozen=True)
class PlannedModel:
    """The model of a plan; ``num_layers`` includes layers without attention."""

    name: str
    revision: str | None
    config_hash: str | None
    weights_hash: str | None
    num_layers: int
    dtype: str
    layers: tuple[PlannedLayer, ...]


@dataclass(frozen=True)
class LengthBin:
    """Number of sequences with at least ``at_least`` and fewer than ``below`` tokens."""

    at_least: int
    below: int
    sequences: int


@dataclass(frozen=True)
class Calibration:
    """Corpus, model settings and lengths of the evidence.

    Attributes:
        run_id: The scan in its store.
        sequences: All sequences of the scan, and ``tokens`` their real tokens.
        sink: First keys that the scan counted as sink, and ``recent`` the last ones that it counted as recent.
        evidence_sequences: Sequences longer than ``sink + recent``. Shorter ones have no distant keys and are left out.
        evidence_queries: Queries of those sequences that have distant keys.
        code_version: Version of headscan that made the scan.
    """

    run_id: str
    corpus: str | None
    corpus_hash: str | None
    tokenizer_hash: str | None
    bos_policy: str | None
    dtype: str
    attention_path: str | None
    sequences: int
    tokens: int
    length_histogram: tuple[LengthBin, ...]
    sink: int
    recent: int
    evidence_sequences: int
    evidence_queries: int
    code_version: str | None


@dataclass(frozen=True)
class GroupValue:
    """Largest and mean value over query heads; None if not measured."""

    max: float | None
    mean: float | None


@dataclass(frozen=True)
class Evidence:
    """Means over the evidence sequences of the query heads that read one KV head.

    They include query heads of layers that share its cache.

    Attributes:
        distant_mass: Mean over all queries, including those without distant keys, as in the catalogue.
        far_mass: Distant mass of the queries that have distant keys: the sum of ``tokens * distant_mass`` over the sum
            of ``tokens - sink - recent``. Unlike ``distant_mass`` it does not depend on the sequence lengths by
            definition.
        entropy: In nats.
        output_norm: Mean norm of the head's output, and ``output_norm_ln`` the same over its layer's mean.
    """

    sink_mass: GroupValue
    recent_mass: GroupValue
    distant_mass: GroupValue
    far_mass: GroupValue
    entropy: GroupValue
    output_norm: GroupValue
    output_norm_ln: GroupValue


@dataclass(frozen=True)
class PlannedHead:
    """Decision on one KV head.

    Attributes:
        score: 0 to 1, higher = keep; 1 for a protected head, which is never ranked.
        head_class: ``retrieval``: full cache; ``streaming``: a window; ``protected``: not a candidate, because
            its layer is not of type ``full`` or was not measured.
        action: ``full``: keep all tokens; ``window``: keep the first ``sink`` and last ``recent`` tokens.
        sink: None unless the action is ``window``, as for ``recent``.
    """

    layer: int
    kv_head: int
    score: float
    head_class: HeadClass
    action: HeadAction
    sink: int | None
    recent: int | None
    evidence: Evidence


@dataclass(frozen=True)
class QueryHead:
    """One query head's numbers, as in ``Evidence``.

    Attributes:
        need: ``far_mass`` times ``output_norm_ln``, which the group reduction maximises.
    """

    layer: int
    head: int
    kv_head: int
    need: float | None
    sink_mass: float | None
    recent_mass: float | None
    distant_mass: float | None
    far_mass: float | None
    entropy: float | None
    output_norm: float | None
    output_norm_ln: float | None


@dataclass(frozen=True)
class LengthBudget:
    """Bytes of one sequence's KV cache at ``tokens`` tokens, without and with the plan."""

    tokens: int
    kv_bytes: int
    planned_bytes: int
    saved_bytes: int
    saved_share: float


@dataclass(frozen=True)
class Budget:
    """Savings of a plan, as a share of KV heads and of KV bytes by sequence length."""

    kv_heads: int
    window_heads: int
    window_share: float
    lengths: tuple[LengthBudget, ...]
