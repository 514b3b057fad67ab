"""Records of a plan: KV heads and their actions, calibrations, and the planned model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headscan.analysis.errors import AnalysisError

#: What the KV cache of a layer holds. ``full``: a key and a value of every token for each KV head. ``sliding``: the
#: same of the last tokens alone, by a window or in chunks. ``latent``: one vector a token for all heads (MLA).
#: ``shared``: nothing, because the layer reads the cache of an earlier one. ``uncached``: nothing, as in encoders.
LayerType = Literal["full", "sliding", "latent", "shared", "uncached"]


#: Methods that score KV heads; see `keep_scores` and `scan_scores`.
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
    """Evidence on one KV head. Group values cover the query heads that read it. They include query heads of layers that
    share its cache. Masses, entropy and norms are means over the evidence sequences of a scan.

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


#: Tools whose patterns can be read.
PatternFormat = Literal["duoattention", "rlkv", "prulong", "headkv"]


@dataclass(frozen=True)
class LengthBin:
    """Number of sequences with at least ``at_least`` and fewer than ``below`` tokens."""

    at_least: int
    below: int
    sequences: int


@dataclass(frozen=True)
class ScanCalibration:
    """Corpus, model settings and lengths of a scan.

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
    kind: Literal["scan"] = "scan"


@dataclass(frozen=True)
class ProbeCalibration:
    """Behaviours, text and model settings of a probe.

    Attributes:
        run_id: The probe in its store.
        behaviours: Behaviours that decide the scores, the first before the others.
        corpus: Text of the haystacks; None if no behaviour needs one.
    """

    run_id: str
    behaviours: tuple[str, ...]
    corpus: str | None
    corpus_hash: str | None
    tokenizer_hash: str | None
    dtype: str
    attention_path: str | None
    code_version: str | None
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True)
class DamageTexts:
    """Sequences on which damage was measured.

    Attributes:
        task: Text (ordinary documents), or a recall task.
        name: Name of the corpus or of the prompts.
        content_hash: Hash of the token ids.
        tokens: Tokens of all ``sequences``.
        gate_points: Values of the gate (1 = full cache, 0 = window) at which the derivative was taken; empty if heads
            were windowed one by one.
    """

    task: Literal["text", "needle", "copying"]
    name: str
    content_hash: str
    sequences: int
    tokens: int
    gate_points: tuple[float, ...]


@dataclass(frozen=True)
class DamageCalibration:
    """Texts, window and model settings of a damage measurement.

    Attributes:
        texts: What was measured on; at least one entry.
        sink: First tokens of the measured windows, and ``recent`` the last ones of the narrowest one; `HeadDamage` has
            each head's.
        seed: Seed of the prompts.
    """

    texts: tuple[DamageTexts, ...]
    sink: int
    recent: int
    dtype: str
    attention_path: str | None
    code_version: str | None
    seed: int | None
    kind: Literal["damage"] = "damage"

    def __post_init__(self) -> None:
        if not self.texts:
            raise PlanError("the damage measurement names no texts. Give at least one entry of `texts`")


@dataclass(frozen=True)
class PatternCalibration:
    """File of an imported pattern.

    Attributes:
        sha256: Hash of the file.
        sink_size: First tokens of a window head by the file; None if it does not state them, as for ``recent_size`` and
            ``sparsity`` (share of window heads).
        inverted: Low numbers keep the full cache in the file.
        run_id: Run from which the model's shape was read.
    """

    format: PatternFormat
    path: str
    sha256: str
    sink_size: int | None
    recent_size: int | None
    sparsity: float | None
    inverted: bool
    run_id: str | None
    kind: Literal["pattern"] = "pattern"


@dataclass(frozen=True)
class RandomCalibration:
    """Seed of random scores, and the run from which the model's shape was read."""

    seed: int
    run_id: str | None
    kind: Literal["random"] = "random"


Calibration = ScanCalibration | ProbeCalibration | DamageCalibration | PatternCalibration | RandomCalibration


_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

#: Note of a plan whose scan did not record the KV cache.
DERIVED_NOTE = (
    "the scan does not record the KV cache: bytes assume that every KV head caches a key and a value of each token,"
    " which is wrong for a latent cache (MLA), layers that share a cache, and chunked attention; scan again for exact"
    " bytes"
)


def planned_model(run: Mapping[str, Any], *, equal_groups: bool = True) -> tuple[PlannedModel, bool]:
    """Return the model of a scan from its row of ``runs``, and whether the row records the KV cache.

    Args:
        equal_groups: Refuse a pruned model in which query heads of one layer read KV heads in groups of different
            sizes. False accepts it, for methods that score KV heads themselves.
    """
    sites = sorted((site for site in run["grid"] or () if site["site"] == "self"), key=lambda site: site["layer"])
    if not sites:
        raise PlanError(f"run {run['run_id']} does not record the model's self-attention heads. Scan again")
    uneven = [site["layer"] for site in sites if site.get("kv_index") is not None]
    if equal_groups and uneven:
        raise PlanError(
            f"layer {uneven[0]} of {run['model']}: its KV heads serve different numbers of query heads (limit: one"
            " number per layer). Use method measured or random"
        )
    recorded = all(site.get("cache_bytes_per_token") is not None for site in sites)
    model = PlannedModel(
        name=run["model"],
        revision=run["model_revision"],
        config_hash=run["model_config_hash"],
        weights_hash=run["weights_hash"],
        num_layers=run["num_layers"],
        dtype=str(run["dtype"]).removeprefix("torch."),
        layers=tuple(_layer(site if recorded else site | _derived_cache(run, site)) for site in sites),
        max_tokens=sites[0].get("max_tokens"),
    )
    return model, recorded


def _derived_cache(run: Mapping[str, Any], site: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the cache of a layer for older runs: a key and a value of each token in each KV head."""
    size = _DTYPE_BYTES.get(str(run["dtype"]).removeprefix("torch."))
    if size is None:
        raise PlanError(
            f"run {run['run_id']} does not record the KV cache and has dtype {run['dtype']}, whose bytes are unknown."
            f" Scan again with one of {', '.join(_DTYPE_BYTES)}"
        )
    if not site["head_dim"] or site["head_dim"] != site["value_dim"]:
        raise PlanError(
            f"run {run['run_id']} does not record the KV cache, and it does not follow from key width"
            f" {site['head_dim']} and value width {site['value_dim']} of layer {site['layer']}. Scan again"
        )
    heads, window = site["num_key_value_heads"], site["sliding_window"]
    return {
        "cache_heads": heads,
        "cache_bytes_per_token": heads * (site["head_dim"] + site["value_dim"]) * size,
        # The newest token of a window is not in the cache when it is read.
        "cache_tokens": None if window is None else window - 1,
    }


def _layer(site: Mapping[str, Any]) -> PlannedLayer:
    kind, heads = _type(site), site["num_key_value_heads"]
    return PlannedLayer(
        layer=site["layer"],
        type=kind,
        num_attention_heads=site["num_attention_heads"],
        num_key_value_heads=heads,
        head_dim=site["head_dim"],
        value_dim=site["value_dim"],
        sliding_window=site["sliding_window"],
        cache_bytes_per_token=site["cache_bytes_per_token"],
        cache_tokens=site["cache_tokens"],
        kv_bytes=site["cache_bytes_per_token"] // heads if kind in ("full", "sliding") else None,
        kv_shared_from=site.get("kv_shared_from"),
    )


def _type(site: Mapping[str, Any]) -> LayerType:
    if site.get("kv_shared_from") is not None:
        return "shared"
    if not site["cache_bytes_per_token"]:
        return "uncached"
    if site["cache_heads"] % site["num_key_value_heads"]:
        return "latent"
    return "full" if site["cache_tokens"] is None and site["sliding_window"] is None else "sliding"
