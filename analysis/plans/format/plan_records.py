"""Records of a head plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headscan.analysis.errors import AnalysisError

#: What the KV cache of a layer holds. ``full``: a key and a value of every token for each KV head. ``sliding``: the
#: same of the last tokens alone, by a window or in chunks. ``latent``: one vector a token for all heads (MLA).
#: ``shared``: nothing, because the layer reads the cache of an earlier one. ``uncached``: nothing, as in encoders.
LayerType = Literal["full", "sliding", "latent", "shared", "uncached"]


#: Methods that score KV heads; see `headscan.analysis.plans.methods`.
PlanMethod = Literal["measured", "distant_mass", "retrieval_score", "imported", "random"]

HeadClass = Literal["retrieval", "streaming", "removable", "protected"]

HeadAction = Literal["full", "window", "drop"]

#: Why heads cannot get a window, by type of layer.
WHY_PROTECTED: dict[LayerType, str] = {
    "sliding": "the model itself bounds their layers, with a sliding window or in chunks",
    "latent": "their layers cache one latent vector a token for all heads (MLA)",
    "shared": "their layers read the cache of an earlier layer",
    "uncached": "their layers cache nothing",
}


class PlanError(AnalysisError):
    """A plan cannot be made, read, exported or used with a model."""


#: Most layers of a model, far beyond any known one.
_MOST_LAYERS = 100_000

#: Smallest values of the fields of a layer.
_LEAST = {
    "layer": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 0,
    "value_dim": 0,
    "sliding_window": 0,
    "cache_bytes_per_token": 0,
    "cache_tokens": 0,
    "kv_bytes": 0,
    "kv_shared_from": 0,
}


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

    Raises:
        PlanError: A number is out of range.
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

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlanError(f"{name} of layer {self.layer} is {value} (limit {least}). Make the plan again")

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the layer's cache after ``tokens`` tokens of one sequence."""
        return self.cache_bytes_per_token * (tokens if self.cache_tokens is None else min(tokens, self.cache_tokens))


@dataclass(frozen=True)
class PlannedModel:
    """The model of a plan.

    Attributes:
        num_layers: All layers, those without attention included.
        max_tokens: Largest number of tokens with positions; None without a known limit.

    Raises:
        PlanError: No layers or too many, or layers that are out of order or beyond the last one.
    """

    name: str
    revision: str | None
    config_hash: str | None
    weights_hash: str | None
    num_layers: int
    dtype: str
    layers: tuple[PlannedLayer, ...]
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= _MOST_LAYERS:
            raise PlanError(f"num_layers is {self.num_layers} (limit 1 to {_MOST_LAYERS}). Make the plan again")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise PlanError(f"max_tokens is {self.max_tokens} (limit 1). Make the plan again")
        if not self.layers:
            raise PlanError("the plan's model has no layers with attention. Make the plan again")
        after = -1
        for layer in self.layers:
            if not after < layer.layer < self.num_layers:
                raise PlanError(
                    f"layer {layer.layer} is listed after layer {after} of {self.num_layers} layers (limit ascending,"
                    f" below {self.num_layers}). Make the plan again"
                )
            after = layer.layer


@dataclass(frozen=True)
class GroupValue:
    """Largest and mean value over query heads; None if not measured."""

    max: float | None = None
    mean: float | None = None


@dataclass(frozen=True)
class HeadDamage:
    """Loss that a window on one KV head adds, in nats per token; None if not measured.

    Attributes:
        text: On ordinary text, estimated from the derivative by a gate.
        recall: On recall prompts, estimated likewise.
        confirmed_text: On text, measured with a real window mask, as ``confirmed_recall`` on recall prompts.
        recent: Last tokens of the measured window.
    """

    text: float | None
    recall: float | None
    confirmed_text: float | None = None
    confirmed_recall: float | None = None
    recent: int | None = None


@dataclass(frozen=True)
class Evidence:
    """Evidence on one KV head. Group values cover the query heads that read it.

    They include query heads of layers that share its cache. Masses, entropy and norms are means over the evidence
    sequences of a scan.

    Attributes:
        distant_mass: Mean over all queries, including those without distant keys, as in the catalogue.
        far_mass: Distant mass of the queries that have distant keys: the sum of ``tokens * distant_mass`` over the sum
            of ``tokens - sink - recent``. Unlike ``distant_mass`` it does not depend on the sequence lengths by
            definition.
        entropy: In nats.
        output_norm: Mean norm of the head's output, and ``output_norm_ln`` the same over its layer's mean.
        retrieval_score: Behaviour of a probe, as ``induction_score``.
        damage: Measured damage; None if not measured.
        pattern: Number of an imported pattern, high = keep; None without one.
        removable: Verdict by which the head can be dropped; None if there is none.
    """

    sink_mass: GroupValue = field(default_factory=GroupValue)
    recent_mass: GroupValue = field(default_factory=GroupValue)
    distant_mass: GroupValue = field(default_factory=GroupValue)
    far_mass: GroupValue = field(default_factory=GroupValue)
    entropy: GroupValue = field(default_factory=GroupValue)
    output_norm: GroupValue = field(default_factory=GroupValue)
    output_norm_ln: GroupValue = field(default_factory=GroupValue)
    retrieval_score: GroupValue = field(default_factory=GroupValue)
    induction_score: GroupValue = field(default_factory=GroupValue)
    damage: HeadDamage | None = None
    pattern: float | None = None
    removable: str | None = None


@dataclass(frozen=True)
class PlannedHead:
    """Decision on one KV head.

    Attributes:
        score: 0 to 1, higher = keep; 1 for a protected head, which is never ranked.
        head_class: ``retrieval``: full cache; ``streaming``: a window; ``removable``: no cache; ``protected``: not a
            candidate, because its layer is not of type ``full`` or was not measured.
        action: ``full``: keep all tokens; ``window``: keep the first ``sink`` and last ``recent`` tokens; ``drop``:
            keep none.
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

    def kept_tokens(self, tokens: int) -> int:
        """Return the number of tokens that the head keeps after ``tokens`` tokens."""
        if self.action == "window":
            return min(tokens, (self.sink or 0) + (self.recent or 0))
        return tokens if self.action == "full" else 0


@dataclass(frozen=True)
class QueryHead:
    """One query head's numbers, as in ``Evidence``; None if not measured.

    Attributes:
        need: ``far_mass`` times ``output_norm_ln``, which the group reduction maximises.
    """

    layer: int
    head: int
    kv_head: int
    need: float | None = None
    sink_mass: float | None = None
    recent_mass: float | None = None
    distant_mass: float | None = None
    far_mass: float | None = None
    entropy: float | None = None
    output_norm: float | None = None
    output_norm_ln: float | None = None
    retrieval_score: float | None = None
    induction_score: float | None = None
