"""The plan of a model's KV heads, its file and the file's JSON schema."""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from headscan.errors import check_type, first_line
from headscan.plans.plan_budgets import Budget
from headscan.plans.plan_records import (
    CHECKED,
    MOST_INTEGER,
    WHY_PROTECTED,
    Granularity,
    PlanError,
    PlanMethod,
    PlannedHead,
    PlannedModel,
    PlanRecord,
    PlanSource,
    Positive,
    QueryHead,
    Rows,
    plan_error,
    shown,
)
from headscan.store.output_files import write_text
from headscan.text_tables import percent
from headscan.windows import DROPPED, KeptKeys, KvHead, Window, is_chunk, whole_blocks

FORMAT = "headscan-head-plan"

#: Increase with every change of the fields; the reader refuses other versions.
VERSION = 5

#: Fields that only plans for serving engines have, so that other plans keep their text.
_OF_ENGINES = ("block", "chunk")

#: Most levels of nested values in `validation`.
_MOST_LEVELS = 32


def _check_plain(value: Any, place: str = "plan.validation", levels: int = _MOST_LEVELS) -> Any:
    """Return the value of a JSON document unchanged, or raise PlanError if other programs cannot hold it."""
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise PlanError(f"{place} is an integer of {value.bit_length()} bits (limit {MOST_INTEGER}). {_AGAIN}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{place} is {value} (limit finite numbers). {_AGAIN}")
    if isinstance(value, list | dict):
        if not levels:
            raise PlanError(f"{place} nests its values too deeply (limit {_MOST_LEVELS} levels). {_AGAIN}")
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(part, f"{place}[{name!r}]", levels - 1)
    return value


@dataclass(frozen=True, config=CHECKED)
class HeadPlan(PlanRecord):
    """Tokens that each KV head of a model keeps, with the evidence.

    Attributes:
        method: Method that scored the heads.
        calibration: Origin of the scores.
        granularity: Unit of a decision; ``layer``: all KV heads of a layer keep the same tokens.
        group_reduction: Reduction over the query heads of a KV head.
        score: Definition of the keep-score in words.
        heads: One entry per KV head, in order of layer and KV head.
        query_heads: Their numbers, in order of layer and query head.
        validation: Benchmark result of this plan (task, mode, before and after, controls); None if not validated.
        notes: Limitations of the evidence.
        block: Tokens of a block of the KV cache of the engine that serves the plan. First and last tokens are kept in
            whole blocks: the blocks of the first ``sink`` tokens, and those from the one on that holds the first of
            the last ``recent`` tokens. None keeps single tokens.
        chunk: Tokens that see the same window, 1 or whole blocks: those whose positions begin with a multiple of
            ``chunk`` see the window of the first of them, and each other until themselves. None gives each token its
            own.
    """

    model: PlannedModel
    method: PlanMethod
    calibration: PlanSource
    granularity: Granularity
    group_reduction: Literal["max"]
    score: str
    heads: Rows[PlannedHead]
    query_heads: Rows[QueryHead]
    budget: Budget
    validation: Annotated[Mapping[str, Any] | None, AfterValidator(_check_plain)]
    notes: Rows[str]
    block: Positive | None = None
    chunk: Positive | None = None

    def __repr__(self) -> str:
        lines = self.summary()[: -len(self.notes) or None]
        return f"HeadPlan({self.model.name}, method {self.method}: {'; '.join(lines)})"

    def __post_init__(self) -> None:
        self._check_count()
        check_chunk(self.chunk, self.block)
        places = [(head.layer, head.kv_head) for head in self.heads]
        expected = [(layer.layer, k) for layer in self.model.layers for k in range(layer.num_key_value_heads)]
        if places != expected:
            odd = sorted(set(places) ^ set(expected))
            raise PlanError(
                f"the plan has {len(places)} entries for the {len(expected)} KV heads of {self.model.name}"
                + (f", and (layer, KV head) {odd[0]} is missing or unexpected" if odd else ", not in order")
                + ". Make the plan again with `headscan plan`"
            )
        types = {layer.layer: layer.type for layer in self.model.layers}
        for head in self.heads:
            if problem := _contradiction(head, full=types[head.layer] == "full"):
                why = WHY_PROTECTED.get(types[head.layer])
                raise PlanError(
                    f"the plan's entry of layer {head.layer}, KV head {head.kv_head} contradicts itself: {problem}"
                    f" (score {head.score}, window {head.window and head.window.key}"
                    + (f"; {why}" if why and head.window is not None else "")
                    + "). Make the plan again with `headscan plan`"
                )
        if self.granularity == "layer":
            self._check_layers()
        self._check_budget()

    def _check_layers(self) -> None:
        """Raise PlanError if the KV heads of a layer keep different tokens."""
        of_layer: dict[int, Window | None] = {}
        for head in self.heads:
            if of_layer.setdefault(head.layer, head.window) != head.window:
                raise PlanError(
                    f"the KV heads of layer {head.layer} keep different tokens (limit: the same in a plan by layer)."
                    " Make the plan again with `headscan plan`"
                )

    def _check_count(self) -> None:
        """Raise PlanError if the model has another number of KV heads than the plan has entries. The count comes first,
        because the file may state any number.
        """
        # The layer with the most KV heads is the likely culprit of another sum.
        largest = max(self.model.layers, key=lambda layer: layer.num_key_value_heads)
        expected = sum(layer.num_key_value_heads for layer in self.model.layers)
        if expected != len(self.heads):
            raise PlanError(
                f"the plan has {len(self.heads)} entries for the {expected} KV heads of {self.model.name}"
                f" (num_key_value_heads of layer {largest.layer} is {largest.num_key_value_heads}). Make the plan again"
                " with `headscan plan`"
            )

    def _check_budget(self) -> None:
        """Raise PlanError if the budget counts other entries than the plan has."""
        dropped = sum(head.window == DROPPED for head in self.heads)
        for name, counted in (
            ("kv_heads", len(self.heads)),
            ("window_heads", len(self.window_heads)),
            ("dropped_heads", dropped),
        ):
            if getattr(self.budget, name) != counted:
                raise PlanError(
                    f"{name} of the budget is {getattr(self.budget, name)}, but the entries have {counted}. Make the"
                    " plan again with `headscan plan`"
                )

    @property
    def windows(self) -> dict[KvHead, Window | None]:
        """Window of each (layer, KV head), in the blocks and chunks of the engine; None keeps all tokens."""
        sizes = self.block, self.chunk
        return {(head.layer, head.kv_head): head.window and head.window.sized(*sizes) for head in self.heads}

    @property
    def kept(self) -> KeptKeys:
        """The windows for caches, masks and arms, without the evidence: small enough to be sent with every item of
        work.
        """
        counts, sliding = dict.fromkeys(range(self.model.num_layers), 0), {}
        for layer in self.model.layers:
            if layer.type in ("full", "latent"):
                counts[layer.layer] = layer.num_key_value_heads
            elif layer.type == "sliding" and layer.sliding_window is not None:  # None in chunked layers
                counts[layer.layer], sliding[layer.layer] = layer.num_key_value_heads, layer.sliding_window
        windows = [(*place, window) for place, window in self.windows.items() if window is not None]
        return replace(KeptKeys.of(windows, counts), block=self.block or 1, sliding=sliding)

    @property
    def digest(self) -> str:
        """Six hexadecimal digits, equal for equal windows."""
        windows = [(layer, head, *window.key) for layer, head, window in self.kept.windows]
        return hashlib.sha256(json.dumps((self.block, self.chunk, windows)).encode()).hexdigest()[:6]

    @property
    def window_heads(self) -> list[KvHead]:
        """(layer, KV head) of every head that keeps only a window."""
        return [(head.layer, head.kv_head) for head in self.heads if head.window not in (None, DROPPED)]

    def summary(self) -> list[str]:
        """Return the plan in a few lines of text."""
        budget = self.budget
        lines = [
            f"{budget.window_heads} of {budget.kv_heads} KV heads keep {self.window_text()}"
            f" ({percent(budget.window_share)}); the others keep all tokens"
        ]
        if self.granularity == "layer":
            windowed = len({layer for layer, _ in self.window_heads})
            lines[0] = f"{windowed} of {len(self.model.layers)} layers with attention: {lines[0]}"
        if budget.dropped_heads:
            lines[0] = lines[0].replace("; the others", f", {budget.dropped_heads} keep none; the others")
        if self.block is not None or self.chunk is not None:
            lines.append(f"for an engine with {self.engine_text()}")
        lines += [
            f"at {length.tokens:,} tokens: {length.kv_bytes / 2**20:,.1f} MiB of KV cache in {self.model.dtype} become"
            f" {length.planned_bytes / 2**20:,.1f} MiB ({percent(length.saved_share)} saved)"
            for length in budget.lengths
        ]
        return lines + list(self.notes)

    def window_text(self) -> str:
        """Return the tokens of window heads in words."""
        windows = {head.window for head in self.heads} - {None, DROPPED}
        if not windows:
            return "a window"
        sinks, recents = ({getattr(window, name) for window in windows} for name in ("sink", "recent"))

        def span(values: set[int]) -> str:
            return f"{min(values)}" if len(values) == 1 else f"{min(values)} to {max(values)}"

        return f"{span(sinks)} first and {span(recents)} last tokens"

    def engine_text(self) -> str:
        """Return blocks and chunks of the serving engine in words."""
        parts = (("blocks", self.block), ("chunks", self.chunk))
        return " and ".join(f"{what} of {tokens} tokens" for what, tokens in parts if tokens is not None)

    def to_json(self) -> str:
        """Return the text of ``head_plan.json``, with one line per head and per other field."""
        lines = []
        for key, value in {"format": FORMAT, "version": VERSION, **to_jsonable_python(self)}.items():
            if key in _OF_ENGINES and value is None:
                continue
            if key in ("heads", "query_heads"):
                rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in value)
                lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> Path:
        """Write the plan to ``path`` atomically."""
        return write_text(path, self.to_json())


def _contradiction(head: PlannedHead, *, full: bool) -> str | None:
    """Return the fault of an entry, or None; ``full`` means that its layer has an unbounded cache of its own."""
    if head.window is None:
        return None
    if not full:
        return "its layer cannot keep less"
    if head.score is None:
        return "a head without a score keeps all tokens"
    if len(head.window.key) > 2:
        return "blocks and chunks are fields of the plan"
    if head.window == DROPPED and head.verdict is None:
        return "only a head with a verdict can be dropped"
    return None


def check_is_plan(plan: object) -> None:
    """Raise PlanError if an object is no plan, such as the path of its file."""
    if not isinstance(plan, HeadPlan):
        raise PlanError(f"`plan={reprlib.repr(plan)}` is no HeadPlan. Read it with load_plan")


def check_chunk(chunk: int | None, block: int | None) -> None:
    """Raise PlanError if windows in blocks cannot have chunks of so many tokens."""
    if not is_chunk(chunk, block):
        raise PlanError(f"`chunk={chunk}` (limit 1, or a multiple of `block={block}`). Change `chunk`")


def layer_bytes(
    model: PlannedModel, windows: Mapping[KvHead, Window | None], tokens: int, block: int | None = None
) -> dict[int, int]:
    """Return the bytes of one sequence's cache after ``tokens`` tokens by layer, if all KV heads keep their windows."""
    whole = whole_blocks(tokens, block)
    held = {window: whole if window is None else window.kept(tokens) for window in set(windows.values())}
    kept: dict[int, int] = {}
    for (layer, _), window in windows.items():
        kept[layer] = kept.get(layer, 0) + held[window]
    return {
        layer.layer: kept.get(layer.layer, 0) * layer.kv_bytes
        if layer.type == "full" and layer.kv_bytes is not None
        else layer.cache_bytes(tokens, block)
        for layer in model.layers
    }


def planned_bytes(plan: HeadPlan, tokens: int) -> int:
    """Return the bytes of one sequence's KV cache after ``tokens`` tokens with a plan; exact.

    Full heads keep all tokens, window heads ``min(tokens, sink + recent)``, dropped heads none, sliding layers at most
    their own bound. A plan with blocks counts whole ones, and one with chunks the tokens that the last one sees.
    `planned_layer_bytes` gives the same by layer.
    """
    return sum(planned_layer_bytes(plan, tokens).values())


def planned_layer_bytes(plan: HeadPlan, tokens: int) -> dict[int, int]:
    """Return the bytes of `planned_bytes` by layer."""
    check_is_plan(plan)
    return layer_bytes(plan.model, plan.windows, tokens, plan.block)


def check_model(
    plan: HeadPlan,
    *,
    config_hash: str | None = None,
    weights_hash: str | None = None,
    revision: str | None = None,
    grid: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Raise PlanError if a plan was made for another model. ``grid`` has one mapping per attention site, as in
    ``runs.grid``; only self-attention is compared. An argument of None is not compared.
    """
    check_is_plan(plan)
    compared = False
    shape = [tuple(getattr(layer, name) for name in _SHAPE) for layer in plan.model.layers]
    own_sites = [site for site in grid or () if site["site"] == "self"]
    shape_of_grid = sorted(tuple(site.get(name) for name in _SHAPE) for site in own_sites)
    for what, ours, theirs in (
        ("configuration hash", plan.model.config_hash, config_hash),
        ("weights hash", plan.model.weights_hash, weights_hash),
        ("revision", plan.model.revision, revision),
        ("head grid", shape, None if grid is None else shape_of_grid),
    ):
        if ours is None or theirs is None:
            continue
        compared = True
        if ours != theirs:
            detail = "" if what == "head grid" else f" {ours}, this model has {theirs}"
            # The hash is that of the files; comparing the contents of large models would take minutes.
            same = "; or if these weights are only stored in other files, set model.weights_hash of the plan to null"
            raise PlanError(
                f"the plan was made for {plan.model.name} with another {what}{detail}. Make a plan for this model"
                f"{same if what == 'weights hash' else ''}"
            )
    if not compared:
        raise PlanError(
            f"cannot check that the model is {plan.model.name}, the model of the plan. Give its configuration hash,"
            " weights hash or head grid"
        )


_SHAPE = ("layer", "num_attention_heads", "num_key_value_heads", "head_dim", "value_dim", "sliding_window")


#: Largest file, in bytes: about 100 times the plan of 128 layers with 128 KV heads each.
_MOST_BYTES = 1 << 30

_AGAIN = "Make the plan again with `headscan plan`"


def load_plan(path: str | Path) -> HeadPlan:
    """Read a plan that ``HeadPlan.save`` wrote. Every field is checked before it is used, so a damaged or hostile file
    costs no more time than reading it.

    Raises:
        PlanError: Missing, not a regular file, not a head plan, of another version, or damaged.
    """
    check_type("path", path, str | os.PathLike, "the file of a plan", PlanError)
    try:
        data = json.loads(_content_of(Path(path)))
    except OSError as error:
        raise PlanError(f"cannot read {path} ({error.strerror}). Name a plan that `headscan plan` wrote") from error
    except RecursionError as error:
        raise PlanError(f"{path} nests its values too deeply. Name a plan that `headscan plan` wrote") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON ({first_line(error)}). Name a plan that `headscan plan` wrote") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{path} is not a head plan (no format {FORMAT!r}). Name a plan that `headscan plan` wrote")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{path} has version {shown(data.get('version'))} of the head plan format (limit {VERSION})."
            " Make the plan again with `headscan plan`"
        )
    try:
        fields = {k: v for k, v in data.items() if k not in ("format", "version")}
        return TypeAdapter(HeadPlan).validate_python(dict.fromkeys(_OF_ENGINES) | fields)
    except ValidationError as error:
        raise plan_error(error, f"{path}: plan", _AGAIN) from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _content_of(path: Path) -> bytes:
    """Return the content of a regular file."""
    facts = path.stat()
    if not S_ISREG(facts.st_mode) and not path.is_dir():  # reading a folder gives the system's own words
        raise PlanError(f"{path} is not a regular file. Name a plan that `headscan plan` wrote")
    if facts.st_size > _MOST_BYTES:
        raise PlanError(
            f"{path} has {facts.st_size} bytes (limit {_MOST_BYTES}). Name a plan that `headscan plan` wrote"
        )
    return path.read_bytes()


def plan_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 2020-12) of plan files of this version. The committed copy is
    ``docs/head_plan.schema.json``.
    """
    schema = TypeAdapter(HeadPlan).json_schema(mode="serialization")
    schema["properties"] = {"format": {"const": FORMAT}, "version": {"const": VERSION}} | schema["properties"]
    schema["required"] = ["format", "version", *(name for name in schema["required"] if name not in _OF_ENGINES)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "headscan head plan"}
