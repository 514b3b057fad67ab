"""What callers hand to the store and get back from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from headscan.analysis.arm_kinds import ArmKind

RunKind = Literal["scan", "recording", "evaluate", "probe"]
RunStatus = Literal["running", "finished", "failed"]  # as stored; `Store.runs` tells interrupted ones from running ones


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run when it begins; see the comments of the table ``runs``.

    Attributes:
        fingerprint: Hash of everything that decides the numbers. Two runs of one kind and fingerprint are the same run.
        grid: One mapping per site with ``site``, ``layer``, ``num_attention_heads``, ``num_key_value_heads``,
            ``head_dim``, ``value_dim``, ``sliding_window``, ``kv_shared_from``, and what it caches: ``cache_heads``,
            ``cache_bytes_per_token``, ``cache_tokens``.
        config: All other options, JSON-able.
        packages: Package name to version.
        device: Kind and name of the device, such as ``cuda (NVIDIA H200)``; None: unknown.
        code_files_hash: Hash of the Python files that came with the model; None: it runs transformers' own code.
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
        """Software and device, as `provenance` compares them."""
        known = {} if self.device is None else {"device": self.device}
        software = {"packages": dict(self.packages), "code_version": self.code_version}
        return {**software, **known, "code_files_hash": self.code_files_hash}


@dataclass(frozen=True)
class RunState:
    """A run in the store.

    Attributes:
        run_id: Its identity.
        resumed: Whether the store had it already.
        status: ``running``, or ``finished`` when a resumed run had been finished.
        shards: Content hash of every finished shard.
        changes: How software and device differ from those that the run used last; see
            `provenance.provenance_changes`.
    """

    run_id: str
    resumed: bool
    status: RunStatus
    shards: Mapping[int, str]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardRecord:
    """What the ledger keeps of a shard beside the counts, which the store takes from the tables themselves.

    Attributes:
        nonfinite_rows: Head rows with a number that ought to be one and is NaN or infinite.
    """

    shard: int
    content_hash: str
    seconds: float | None = None
    worker: str | None = None
    nonfinite_rows: int = 0


class ShardToWrite(NamedTuple):
    """A shard on its way into the store; `Store.add_shards` says what the tables hold."""

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
    score: str | None
    share: float | None


@dataclass(frozen=True)
class ArmRecord:
    """One arm of an evaluate run; see the comments of the table ``arms``.

    Attributes:
        name: Unique in the run.
        kind: ``random_mask`` is the control of ``mask`` (the same heads for every input), ``random_rule`` that of
            ``rule`` (other heads for each input).
        selection: What the heads were chosen by beside the score, in words; arms that differ in it are points of
            different curves.
        share: Nominal share of heads to ablate, 0 to 1: arms of one share are of one size.
        seed: Seed of a random arm.
        config: JSON-able.
    """

    run_id: str
    name: str
    kind: ArmKind
    mask_id: str | None = None
    score: str | None = None
    selection: str | None = None
    threshold: float | None = None
    share: float | None = None
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmState:
    """An arm in the store, and whether all its answers are there."""

    arm_id: str
    finished: bool
