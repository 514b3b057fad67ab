"""A head plan: what each KV head of one model may forget, and the file it is kept in.

``head_plan.json`` is UTF-8 JSON with ``format`` and ``version``; every other key is a field of ``HeadPlan``. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headscan.analysis.atomic_files import write_text
from headscan.analysis.errors import AnalysisError

FORMAT = "headscan-head-plan"

#: To be raised with every change of the fields below. A plan of another version is refused.
VERSION = 2

#: What the KV cache of a layer holds. ``full``: a key and a value of every token for each KV head. ``sliding``: the
#: same of the last tokens alone, by a window or in chunks. ``latent``: one vector a token for all heads (MLA).
#: ``shared``: nothing, because the layer reads the cache of an earlier one. ``uncached``: nothing, as in encoders.
LayerType = Literal["full", "sliding", "latent", "shared", "uncached"]

HeadClass = Literal["retrieval", "streaming", "protected"]
HeadAction = Literal["full", "window"]


class PlanError(AnalysisError):
    """A plan cannot be made, read, exported, or used with this model."""


@dataclass(frozen=True)
class PlannedLayer:
    """The self-attention of one layer.

    Attributes:
        layer: Index in the model, from 0; layers without attention are left out.
        type: What its KV cache holds, see `LayerType`; only ``full`` layers can be given windows.
        head_dim: Width of a key vector.
        value_dim: Width of a value vector.
        sliding_window: Keys a query sees; None when unbounded.
        cache_bytes_per_token: Bytes of one token in the layer's KV cache, all heads together.
        cache_tokens: Most tokens that the cache keeps; None for no limit.
        kv_bytes: Bytes of one token's key and value in one KV head; None where heads have no part of their own.
        kv_shared_from: The layer whose cache is read; None: its own.
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
        """Bytes of the layer's cache after so many tokens of one sequence."""
        return self.cache_bytes_per_token * (tokens if self.cache_tokens is None else min(tokens, self.cache_tokens))


@dataclass(frozen=True)
class PlannedModel:
    """The one model that a plan is for. ``num_layers`` counts layers without attention too."""

    name: str
    revision: str | None
    config_hash: str | None
    weights_hash: str | None
    num_layers: int
    dtype: str
    layers: tuple[PlannedLayer, ...]


@dataclass(frozen=True)
class LengthBin:
    """How many sequences have at least ``at_least`` and fewer than ``below`` tokens."""

    at_least: int
    below: int
    sequences: int


@dataclass(frozen=True)
class Calibration:
    """What the evidence was measured on.

    Attributes:
        run_id: The scan in its store.
        sequences: All sequences of the scan, and ``tokens`` their real tokens.
        sink: First keys that the scan counted as sink, and ``recent`` the last ones that it counted as recent.
        evidence_sequences: Sequences longer than ``sink + recent``: the others have no distant keys, so their distant
            mass is zero by construction and they are left out.
        evidence_queries: Queries of those sequences that have distant keys.
        code_version: Version of headscan that scanned.
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
    """A number of a KV head's query heads: the largest and the mean; None where not measured."""

    max: float | None
    mean: float | None


@dataclass(frozen=True)
class Evidence:
    """What was measured on the query heads that read one KV head, averaged over the evidence sequences.

    They are its own, and those of layers that share its cache.

    Attributes:
        distant_mass: The catalogue's: a mean over all queries, also those that have no distant keys.
        far_mass: Distant mass of the queries that have distant keys: the sum of ``tokens * distant_mass`` over the sum
            of ``tokens - sink - recent``. Unlike ``distant_mass`` it does not depend on the sequences' lengths by
            construction.
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
    """What one KV head may forget.

    Attributes:
        score: 0 to 1, higher = keep; 1 for a protected head, which is never ranked.
        head_class: ``retrieval``: kept whole; ``streaming``: a window will do; ``protected``: not a candidate, because
            its layer is not of type ``full`` or was not measured.
        action: ``full``: nothing is forgotten; ``window``: all but the first ``sink`` and last ``recent`` tokens is.
        sink: None unless the action is ``window``; the same for ``recent``.
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
        need: ``far_mass`` times ``output_norm_ln``: what the group reduction takes the largest of.
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
    """What a plan saves: as a share of the KV heads, and of the KV bytes at named lengths."""

    kv_heads: int
    window_heads: int
    window_share: float
    lengths: tuple[LengthBudget, ...]


@dataclass(frozen=True)
class HeadPlan:
    """What each KV head of a model may forget, and why.

    Attributes:
        granularity: The unit of a decision.
        group_reduction: How the query heads of a KV head decide together.
        score: The keep-score in words.
        heads: One entry per KV head, in order of layer and KV head.
        query_heads: The numbers behind them, in order of layer and query head.
        validation: What a benchmark said of this plan (task, mode, before and after, controls); None: nothing yet.
        notes: What a reader must know about the evidence.

    Raises:
        PlanError: The entries are not exactly the model's KV heads, or an entry contradicts itself.
    """

    model: PlannedModel
    calibration: Calibration
    granularity: Literal["kv_head"]
    group_reduction: Literal["max"]
    score: str
    heads: tuple[PlannedHead, ...]
    query_heads: tuple[QueryHead, ...]
    budget: Budget
    validation: Mapping[str, Any] | None
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        places = [(head.layer, head.kv_head) for head in self.heads]
        expected = [(layer.layer, k) for layer in self.model.layers for k in range(layer.num_key_value_heads)]
        if places != expected:
            odd = sorted(set(places) ^ set(expected))
            raise PlanError(
                f"the plan has {len(places)} entries for the {len(expected)} KV heads of {self.model.name}"
                + (f", and (layer, KV head) {odd[0]} is amiss" if odd else ", not in order")
                + ": make it again with `headscan plan`"
            )
        whole = {layer.layer for layer in self.model.layers if layer.type == "full"}
        for head in self.heads:
            windowed = head.action == "window"
            agrees = (
                0 <= head.score <= 1
                and (not windowed or head.layer in whole)
                and windowed == (head.head_class == "streaming")
                and windowed == (head.sink is not None)
                and windowed == (head.recent is not None)
            )
            if not agrees:
                raise PlanError(
                    f"the plan's entry of layer {head.layer}, KV head {head.kv_head} contradicts itself (score"
                    f" {head.score:g}, {head.head_class}, {head.action}, sink {head.sink}, recent {head.recent}): make"
                    " the plan again with `headscan plan`"
                )

    @property
    def window_heads(self) -> list[tuple[int, int]]:
        """(layer, KV head) of every head that keeps a window only."""
        return [(head.layer, head.kv_head) for head in self.heads if head.action == "window"]

    def summary(self) -> list[str]:
        """The plan in a few lines for people."""
        budget = self.budget
        window = next((head for head in self.heads if head.action == "window"), self.heads[0])
        lines = [
            f"{budget.window_heads} of {budget.kv_heads} KV heads keep {window.sink} first and {window.recent}"
            f" last tokens ({budget.window_share:.0%}); the others keep everything"
        ]
        lines += [
            f"at {length.tokens:,} tokens: {length.kv_bytes / 2**20:,.1f} MiB of KV cache become"
            f" {length.planned_bytes / 2**20:,.1f} MiB ({length.saved_share:.1%} saved)"
            for length in budget.lengths
        ]
        return lines + list(self.notes)

    def to_json(self) -> str:
        """The text of ``head_plan.json``: one line per head, everything else one line per field."""
        lines = []
        for key, value in {"format": FORMAT, "version": VERSION, **asdict(self)}.items():
            if key in ("heads", "query_heads"):
                rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in value)
                lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> Path:
        """Write the plan to ``path``; the file appears when it is whole.

        Raises:
            OutputError: It cannot be written there.
        """
        return write_text(path, self.to_json())


def check_model(
    plan: HeadPlan,
    *,
    config_hash: str | None = None,
    weights_hash: str | None = None,
    revision: str | None = None,
    grid: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Refuse to use a plan with another model than its own.

    Args:
        config_hash: Hash of the model's configuration; compared where the plan has one too. The same for
            ``weights_hash`` and the hub's ``revision``.
        grid: One mapping per attention site, as in ``runs.grid``; only self-attention is compared.

    Raises:
        PlanError: Something differs, or there is nothing to compare.
    """
    compared = False
    for what, ours, theirs in (
        ("configuration hash", plan.model.config_hash, config_hash),
        ("weights hash", plan.model.weights_hash, weights_hash),
        ("revision", plan.model.revision, revision),
        ("head grid", _shape_of_layers(plan.model.layers), None if grid is None else _shape_of_grid(grid)),
    ):
        if ours is None or theirs is None:
            continue
        compared = True
        if ours != theirs:
            detail = "" if what == "head grid" else f" {ours}, this model has {theirs}"
            raise PlanError(
                f"the plan was made for {plan.model.name} with another {what}{detail}: scan this model and make a plan"
                " from that scan"
            )
    if not compared:
        raise PlanError(
            f"nothing tells whether this is {plan.model.name}, the plan's model: give its configuration hash, weights"
            " hash or head grid"
        )


_SHAPE = ("layer", "num_attention_heads", "num_key_value_heads", "head_dim", "value_dim", "sliding_window")


def _shape_of_layers(layers: Sequence[PlannedLayer]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(layer, name) for name in _SHAPE) for layer in layers]


def _shape_of_grid(grid: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(site.get(name) for name in _SHAPE) for site in grid if site["site"] == "self")
