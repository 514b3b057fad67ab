"""Kinds of arms, and records that the store takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa


class ArmKind(StrEnum):
    """Kinds of arms; the values are those of the column ``arms.kind``."""

    BASELINE = "baseline"
    MASK = "mask"
    RULE = "rule"
    RANDOM_MASK = "random_mask"
    RANDOM_RULE = "random_rule"
    PLAN = "plan"
    RANDOM_PLAN = "random_plan"
    MODEL = "model"
    PRUNED = "pruned"
    RANDOM_PRUNED = "random_pruned"
    LAYERS_DROPPED = "layers_dropped"

    @property
    def is_random(self) -> bool:
        return any(facts.control is self for facts in KIND_FACTS.values())

    @property
    def is_control(self) -> bool:
        """True if the arm is a control: random heads, or whole attention layers."""
        return self.is_random or self is ArmKind.LAYERS_DROPPED

    @property
    def control(self) -> ArmKind | None:
        """The kind of random controls for arms of this kind; None without controls."""
        return KIND_FACTS[self].control

    @property
    def ablates(self) -> bool:
        """True if heads of the baseline's own model are ablated."""
        return KIND_FACTS[self].ablates

    @property
    def shrinks_cache(self) -> bool:
        """True if KV heads keep fewer keys, and no head need be ablated."""
        return KIND_FACTS[self].shrinks_cache

    @property
    def is_pruned(self) -> bool:
        """True if heads are removed from the model's files."""
        return KIND_FACTS[self].is_pruned

    @property
    def equal_size(self) -> str:
        """The common size of an arm and its random controls, in words."""
        return KIND_FACTS[self].equal_size

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


class KindFacts(NamedTuple):
    """What distinguishes a kind of arms; the properties of `ArmKind` explain the fields."""

    control: ArmKind | None = None
    ablates: bool = False
    shrinks_cache: bool = False
    is_pruned: bool = False
    equal_size: str = "as many heads"


_ABLATED = KindFacts(ablates=True)
_PLANNED = KindFacts(shrinks_cache=True, equal_size="as many bytes")
_PRUNED = KindFacts(is_pruned=True, equal_size="as many heads and the same repair")

#: All kinds; a new one also needs a colour in the report.
KIND_FACTS: Mapping[ArmKind, KindFacts] = {
    ArmKind.BASELINE: KindFacts(),
    ArmKind.MASK: _ABLATED._replace(control=ArmKind.RANDOM_MASK),
    ArmKind.RULE: _ABLATED._replace(control=ArmKind.RANDOM_RULE),
    ArmKind.RANDOM_MASK: _ABLATED,
    ArmKind.RANDOM_RULE: _ABLATED,
    ArmKind.PLAN: _PLANNED._replace(control=ArmKind.RANDOM_PLAN),
    ArmKind.RANDOM_PLAN: _PLANNED,
    ArmKind.MODEL: KindFacts(),
    ArmKind.PRUNED: _PRUNED._replace(control=ArmKind.RANDOM_PRUNED),
    ArmKind.RANDOM_PRUNED: _PRUNED,
    ArmKind.LAYERS_DROPPED: _PRUNED,
}

#: The kinds of controls as a list of SQL literals.
CONTROL_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.is_control)
#: The random kinds as a list of SQL literals.
RANDOM_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.is_random)
#: The kinds that ablate heads of the baseline's own model as a list of SQL literals.
ABLATING_KINDS_SQL = ", ".join(f"'{kind}'" for kind in ArmKind if kind.ablates)


RunKind = Literal["scan", "recording", "recall", "evaluate", "ablate", "probe", "importance", "gates", "plan", "prune"]
#: Kinds of runs that are stored and resumed by shards.
SHARDED_KINDS: tuple[RunKind, ...] = ("scan", "recording", "importance")
RunStatus = Literal["running", "part", "finished", "failed"]  # as stored; `Store.runs` adds interrupted


@dataclass(frozen=True)
class RunRecord:
    """A run at its begin; see the comments of the table ``runs``.

    Attributes:
        fingerprint: Hash of everything that decides the numbers; runs of one kind with the same one are the same run.
        grid: One mapping per site and layer: ``site``, ``layer``, ``num_attention_heads``, ``num_key_value_heads``,
            ``head_dim``, ``value_dim``, ``sliding_window``, ``kv_shared_from``, and of its KV cache ``cache_heads``,
            ``cache_bytes_per_token``, ``cache_tokens``.
        device: Kind and name, such as ``cuda (NVIDIA H200)``; None if unknown.
        code_files_hash: Hash of the model's Python files; None if it runs transformers' own code.
    """

    kind: RunKind
    fingerprint: str
    model: str
    num_layers: int
    num_heads: int
    model_revision: str | None = None
    model_config_hash: str | None = None
    weights_hash: str | None = None
    tokenizer_hash: str | None = None
    bos_policy: str | None = None
    corpus: str | None = None
    corpus_hash: str | None = None
    dtype: str | None = None
    attention_path: str | None = None
    grid: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    code_version: str | None = None
    device: str | None = None
    code_files_hash: str | None = None
    total_shards: int | None = None

    @property
    def provenance(self) -> dict[str, Any]:
        """Software and device, in the form that `provenance` compares."""
        known = {} if self.device is None else {"device": self.device}
        software = {"packages": dict(self.packages), "code_version": self.code_version}
        return {**software, **known, "code_files_hash": self.code_files_hash}


@dataclass(frozen=True)
class RunState:
    """A run in the store.

    Attributes:
        resumed: True if the store had the run already.
        status: ``finished`` if that run was finished before.
        changes: Changes of software and device since its last begin; see `provenance.provenance_changes`.
    """

    run_id: str
    resumed: bool
    status: RunStatus
    shards: Mapping[int, str]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardRecord:
    """A shard's row of the ledger, without the counts, which the store derives from the tables. ``nonfinite_rows``
    counts head rows with an unexpected NaN or infinity.
    """

    shard: int
    content_hash: str
    seconds: float | None = None
    worker: str | None = None
    nonfinite_rows: int = 0


class ShardToWrite(NamedTuple):
    """A shard and its tables. NaN and infinity become NULL, and so does a profile with such a bin.

    Attributes:
        sequences: One row per sequence: ``sequence, document, source, tokens, truncated, content_hash``, and
            ``recall_task`` of prompts.
        heads: One row per sequence, site, layer and query head: ``sequence, site, layer, head, kv_head`` and any of the
            catalogue's statistics and profiles (lists with one number per bin); of an importance run ``gate_gradient``,
            ``token_gradient`` and ``entropy`` instead.
    """

    record: ShardRecord
    sequences: pa.Table
    heads: pa.Table


@dataclass(frozen=True)
class Mask:
    """A fixed set of heads, sorted (layer, head) pairs of one site."""

    mask_id: str
    name: str
    site: str
    heads: tuple[tuple[int, int], ...]
    run_id: str | None
    criterion: str | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """One arm of an evaluate run, as the table ``arms`` holds it; see the comments of its columns.

    Attributes:
        arm_id: Hash of the run and of the data that identifies the arm in it (`Arm.id` in ``headscan.engine.arms``);
            empty without a store.
        name: Unique in the run, for people.
        kind: ``random_mask`` is the control of ``mask`` (the same heads for every input), ``random_rule`` that of
            ``rule`` (other heads for each input).
        selection: Further criterion that chose the heads, or the mode of a plan; arms that differ in it belong to
            different curves.
        share: Nominal share of heads to ablate, 0 to 1.
        replacement: None if the arm ablates no heads.
        config: Further settings and measured numbers as JSON data, such as ``kv_shares`` of a plan by length, and
            ``swept`` of the arms that a sweep tried or drew.
        ablated_share: Measured share of ablated or removed heads, 0 to 1; None before the arm is finished.
        look: Last planned look, from 1, whose questions it is asked, after those of earlier ones; None without looks.
    """

    arm_id: str = ""
    run_id: str = ""
    name: str
    kind: ArmKind
    mask_id: str | None = None
    criterion: str | None = None
    selection: str | None = None
    threshold: float | None = None
    share: float | None = None
    seed: int | None = None
    replacement: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ablated_share: float | None = None
    look: int | None = None

    @property
    def weights_left(self) -> float | None:
        """Share of the weights' bytes that a pruned model keeps; None for other arms."""
        return self.config.get("weights_left")

    @property
    def cache_left(self) -> float | None:
        """Share of the KV cache that a pruned model keeps; None for other arms, and if it cannot be sized."""
        return self.config.get("cache_left")

    @property
    def size(self) -> float | None:
        """Share of heads that are ablated or removed, or of KV heads that keep less; None if it is unknown, and for
        another model.
        """
        if self.kind.shrinks_cache:
            return self.share
        return None if self.kind is ArmKind.MODEL else self.ablated_share
