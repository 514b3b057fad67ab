"""Records of a plan: KV heads and their actions, calibrations, and the planned model.

The types of their fields are the checks of a plan file and the source of its JSON schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from headscan.catalog import RECALL_FAMILIES
from headscan.errors import HeadscanError, PlanMismatchError
from headscan.windows import DROPPED, Window, whole_blocks

#: What the KV cache of a layer holds. ``full``: a key and a value of every token for each KV head. ``sliding``: the
#: same of the last tokens alone, by a window or in chunks. ``latent``: one vector a token for all heads (MLA).
#: ``shared``: nothing, because the layer reads the cache of an earlier one. ``uncached``: nothing, as in encoders.
LayerType = Literal["full", "sliding", "latent", "shared", "uncached"]


#: Methods that score KV heads; see `keep_scores` and `scan_scores`.
PlanMethod = Literal["measured", "distant_mass", "retrieval_score", "imported", "random"]

#: Unit of a decision: one KV head, or all KV heads of a layer.
Granularity = Literal["kv_head", "layer"]

#: ``retrieval`` keeps all tokens, ``streaming`` a window, ``dropped`` none, and ``protected`` all, because the head is
#: no candidate for a window.
HeadClass = Literal["retrieval", "streaming", "dropped", "protected"]

if TYPE_CHECKING:
    DamageTask = str
else:
    #: Ordinary text, or a family of recall tasks.
    DamageTask = Literal[("text", *RECALL_FAMILIES)]

#: Why heads cannot get a window, by type of layer.
WHY_PROTECTED: dict[LayerType, str] = {
    "sliding": "the model itself bounds their layers, with a sliding window or in chunks",
    "latent": "their layers cache one latent vector a token for all heads (MLA)",
    "shared": "their layers read the cache of an earlier layer",
    "uncached": "their layers cache nothing",
}


class PlanError(HeadscanError):
    """A plan cannot be made, read, exported or used with a model."""


_T = TypeVar("_T")

#: Largest integer, which JSON numbers of all programs hold exactly.
MOST_INTEGER = 1 << 53

Whole = Annotated[int, Field(strict=True, ge=-MOST_INTEGER, le=MOST_INTEGER)]
Count = Annotated[int, Field(strict=True, ge=0, le=MOST_INTEGER)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MOST_INTEGER)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
#: Rows whose check ends with the first error, because a hostile file may hold any number of them.
Rows = Annotated[tuple[_T, ...], Field(fail_fast=True)]
SomeRows = Annotated[tuple[_T, ...], Field(fail_fast=True, min_length=1)]


def _as_window(value: Any) -> Window | None:
    """Return the window that a file states as a pair of numbers."""
    if value is None or isinstance(value, Window):
        return value
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(number) is int for number in value):
        try:
            return Window(*value)
        except PlanMismatchError:
            pass
    raise PydanticCustomError("window", "Input should be null, or numbers of first and last tokens such as [4, 256]")


#: First and last tokens that a KV head keeps, as a pair in files; None keeps all, and [0, 0] none.
KeptWindow = Annotated[
    Window | None,
    BeforeValidator(_as_window),
    PlainSerializer(lambda window: None if window is None else [window.sink, window.recent]),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": MOST_INTEGER},
                    "minItems": 2,
                    "maxItems": 2,
                },
            ]
        }
    ),
]

#: Most names of fields in an error.
_SHOWN_NAMES = 8

#: Settings of the dataclasses below.
CHECKED = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class PlanRecord:
    """Base of the records. A file must state all fields, also those with a default; a constructor raises PlanError."""

    @classmethod
    def by_name(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Return a record whose fields without a default are the values of their names, or ``others``."""
        names = (each.name for each in fields(cls) if each.default is MISSING)  # type: ignore[arg-type]
        return cls(**{name: values[name] for name in names if name not in others}, **others)

    @model_validator(mode="wrap")
    @classmethod
    def _checked_record(cls, data: Any, checked: Callable[[Any], Any]) -> Any:
        # `fields` takes several times as long, and a plan has thousands of records.
        names = list(cls.__pydantic_fields__)  # type: ignore[attr-defined]
        if isinstance(data, dict) and (odd := set(names) ^ set(data)):
            shown_names = ", ".join(repr(name[:40]) for name in sorted(odd)[:_SHOWN_NAMES])
            raise PydanticCustomError("names", "lacks or should not have {names}", {"names": shown_names})
        if not isinstance(data, ArgsKwargs):
            return checked(data)
        try:
            return checked(dict(zip(names[: len(data.args)], data.args, strict=True)) | (data.kwargs or {}))
        except ValidationError as error:
            raise plan_error(error, cls.__name__, "Change it") from error


def plan_error(error: ValidationError, place: str, fix: str) -> PlanError:
    """Return the first error of a check; ``place`` names the checked record."""
    first = error.errors(include_url=False, include_context=False)[0]
    place += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    if first["type"] == "names":
        return PlanError(f"{place} {first['msg']}. {fix}")
    # The messages of pydantic read "Input should be ..." or "Tuple should have ...", except for a wrong kind.
    limit = first["msg"].partition(" should ")[2].partition(" ")[2] or first["msg"]
    if first["type"].startswith("union_tag"):
        limit = "a known kind"
    return PlanError(f"{place} is {shown(first['input'])} (limit {limit}). {fix}")


def shown(value: Any) -> str:
    """Return the beginning of a value; long integers and collections are named only."""
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value[:40] if isinstance(value, str) else value)


#: What the keep-scores of a method show.
METHOD_SHOWS: dict[PlanMethod, str] = {
    "measured": "the loss that a window on each head adds",
    "distant_mass": "where heads attend",
    "retrieval_score": "which heads copy from far back",
    "imported": "the numbers of another tool",
    "random": "random numbers",
}


@dataclass(frozen=True, config=CHECKED)
class PlannedLayer(PlanRecord):
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

    layer: Count
    type: LayerType
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Count
    value_dim: Count
    sliding_window: Count | None
    cache_bytes_per_token: Count
    cache_tokens: Count | None
    kv_bytes: Count | None
    kv_shared_from: Count | None

    def cache_bytes(self, tokens: int, block: int | None = None) -> int:
        """Return the bytes of the layer's cache after ``tokens`` tokens of one sequence, in whole blocks of ``block``
        tokens; None counts tokens.
        """
        kept = tokens if self.cache_tokens is None else min(tokens, self.cache_tokens)
        return self.cache_bytes_per_token * whole_blocks(kept, block)


@dataclass(frozen=True, config=CHECKED)
class PlannedModel(PlanRecord):
    """The model of a plan.

    Attributes:
        num_layers: All layers, those without attention included.
        max_tokens: Largest number of tokens with positions; None without a known limit.
    """

    name: str
    revision: str | None
    config_hash: str | None
    weights_hash: str | None
    num_layers: Annotated[Positive, Field(le=100_000)]
    dtype: str
    layers: SomeRows[PlannedLayer]
    max_tokens: Positive | None = None

    def __repr__(self) -> str:
        return f"PlannedModel({self.name}, {self.dtype}, {len(self.layers)} of {self.num_layers} layers with attention)"

    def __post_init__(self) -> None:
        after = -1
        for layer in self.layers:
            if not after < layer.layer < self.num_layers:
                raise PlanError(
                    f"layer {layer.layer} is listed after layer {after} of {self.num_layers} layers (limit ascending,"
                    f" below {self.num_layers}). Make the plan again"
                )
            after = layer.layer

    def cache_bytes(self, tokens: int, block: int | None = None) -> int:
        """Return the bytes of all layers; see `PlannedLayer.cache_bytes`."""
        return sum(layer.cache_bytes(tokens, block) for layer in self.layers)


@dataclass(frozen=True, config=CHECKED)
class HeadDamage(PlanRecord):
    """Loss that a window on one KV head adds, in nats per token; None if not measured. In a plan by layer, all KV heads
    of a layer have the loss that windows on all of them add.

    Attributes:
        text: On ordinary text with all other heads full, estimated from the derivative by a gate; of a layer measured
            with real window masks.
        recall: On recall prompts, likewise.
        confirmed_text: On text, with all other heads as planned, measured with real window masks on a part of the
            prompts, as ``confirmed_recall`` on recall prompts.
        recent: Last tokens of the measured window.
    """

    text: Number | None
    recall: Number | None
    confirmed_text: Number | None = None
    confirmed_recall: Number | None = None
    recent: Whole | None = None


@dataclass(frozen=True, config=CHECKED)
class PlannedHead(PlanRecord):
    """Decision on one KV head.

    Attributes:
        score: 0 to 1, higher = keep; None for a protected head, which is never ranked: its layer is not of type
            ``full``, or it was not measured.
        window: First and last tokens that the head keeps; None keeps all tokens.
        damage: Measured damage; None if not measured.
        pattern: Number of an imported pattern, high = keep; None without one.
        verdict: Verdict by which the head can be dropped; None if there is none.
    """

    layer: Count
    kv_head: Count
    score: Share | None
    window: KeptWindow
    damage: HeadDamage | None = None
    pattern: Number | None = None
    verdict: str | None = None

    @property
    def keep_score(self) -> float:
        """The score; 1 for a protected head."""
        return 1.0 if self.score is None else self.score

    @property
    def head_class(self) -> HeadClass:
        if self.window is None:
            return "protected" if self.score is None else "retrieval"
        return "dropped" if self.window == DROPPED else "streaming"


@dataclass(frozen=True, config=CHECKED)
class QueryHead(PlanRecord):
    """One query head's numbers; None if not measured. Masses, entropy and norms are means over the evidence sequences
    of a scan.

    Attributes:
        need: ``far_mass`` times ``output_norm_ln``, which the group reduction maximises.
        distant_mass: Mean over all queries, including those without distant keys, as in the catalogue.
        far_mass: Distant mass of the queries that have distant keys: the sum of ``tokens * distant_mass`` over the sum
            of ``tokens - sink - recent``. Unlike ``distant_mass`` it does not depend on the sequence lengths by
            definition.
        entropy: In nats.
        output_norm: Mean norm of the head's output, and ``output_norm_ln`` the same over its layer's mean.
        retrieval_score: Behaviour of a probe, as ``induction_score``.
    """

    layer: Whole
    head: Whole
    kv_head: Whole
    need: Number | None = None
    sink_mass: Number | None = None
    recent_mass: Number | None = None
    distant_mass: Number | None = None
    far_mass: Number | None = None
    entropy: Number | None = None
    output_norm: Number | None = None
    output_norm_ln: Number | None = None
    retrieval_score: Number | None = None
    induction_score: Number | None = None


#: Tools whose patterns can be read.
PatternFormat = Literal["duoattention", "rlkv", "prulong", "headkv"]


@dataclass(frozen=True, config=CHECKED)
class LengthBin(PlanRecord):
    """Number of sequences with at least ``at_least`` and fewer than ``below`` tokens."""

    at_least: Whole
    below: Whole
    sequences: Whole


@dataclass(frozen=True, config=CHECKED)
class ScanCalibration(PlanRecord):
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
    sequences: Whole
    tokens: Whole
    length_histogram: Rows[LengthBin]
    sink: Whole
    recent: Whole
    evidence_sequences: Whole
    evidence_queries: Whole
    code_version: str | None
    kind: Literal["scan"] = "scan"


@dataclass(frozen=True, config=CHECKED)
class ProbeCalibration(PlanRecord):
    """Behaviours, text and model settings of a probe.

    Attributes:
        run_id: The probe in its store.
        behaviours: Behaviours that decide the scores, the first before the others.
        corpus: Text of the haystacks; None if no behaviour needs one.
    """

    run_id: str
    behaviours: Rows[str]
    corpus: str | None
    corpus_hash: str | None
    tokenizer_hash: str | None
    dtype: str
    attention_path: str | None
    code_version: str | None
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True, config=CHECKED)
class DamageTexts(PlanRecord):
    """Sequences on which damage was measured.

    Attributes:
        task: Text (ordinary documents), or a recall task.
        name: Name of the corpus or of the prompts.
        content_hash: Hash of the token ids.
        tokens: Tokens of all ``sequences``.
        gate_points: Values of the gate (1 = full cache, 0 = window) at which the derivative was taken; empty if heads
            or layers were windowed one by one.
    """

    task: DamageTask
    name: str
    content_hash: str
    sequences: Whole
    tokens: Whole
    gate_points: Rows[Number]


@dataclass(frozen=True, config=CHECKED)
class DamageCalibration(PlanRecord):
    """Texts, window and model settings of a damage measurement.

    Attributes:
        texts: What was measured on; at least one entry.
        sink: First tokens of the measured windows, and ``recent`` the last ones of the narrowest one; `HeadDamage` has
            each head's.
        seed: Seed of the prompts.
    """

    texts: SomeRows[DamageTexts]
    sink: Whole
    recent: Whole
    dtype: str
    attention_path: str | None
    code_version: str | None
    seed: Whole | None
    kind: Literal["damage"] = "damage"


@dataclass(frozen=True, config=CHECKED)
class PatternCalibration(PlanRecord):
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
    sink_size: Whole | None
    recent_size: Whole | None
    sparsity: Number | None
    inverted: StrictBool
    run_id: str | None
    kind: Literal["pattern"] = "pattern"


@dataclass(frozen=True, config=CHECKED)
class RandomCalibration(PlanRecord):
    """Seed of random scores, and the run from which the model's shape was read."""

    seed: Whole
    run_id: str | None
    kind: Literal["random"] = "random"


PlanSource = Annotated[
    ScanCalibration | ProbeCalibration | DamageCalibration | PatternCalibration | RandomCalibration,
    Field(discriminator="kind"),
]


_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}

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
    return PlannedLayer.by_name(
        site,
        type=kind,
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
