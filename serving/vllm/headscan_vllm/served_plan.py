"""The plan in a model's configuration, and the rule by which its windows are served. Nothing here imports vLLM.

The field ``head_plan`` of the configuration:

    {"version": 1, "model": {"hidden_size": 576, ...}, "windows": [[4, 256]], "heads": [[0, 1, 1], ...],
     "block": 16, "chunk": 16}

``heads`` has a row for each layer and a number for each KV head: 0 keeps all tokens, i keeps the i-th window, which is
its first tokens and its last ones. A layer without attention has an empty row. ``block`` and ``chunk`` are optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

VERSION = 1
#: Architectures that can have a plan; with one their names have the prefix.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "DeciLMForCausalLM")
PREFIX = "HeadPlan"

_AGAIN = "Write it again with `headscan export vllm`"
_FIELDS = {"version", "model", "windows", "heads"}
_OPTIONAL = {"block", "chunk"}


class ServedPlanError(ValueError):
    """A plan that cannot be served."""


@dataclass(frozen=True)
class WindowRule:
    """Keys that a query of a windowed KV head sees, as a function of its position alone.

    The window begins ``recent - 1`` keys before the query's chunk, rounded down to a whole block, and ends with the
    query. So neither other requests, nor the steps in which a prompt is read, nor hits of the prefix cache change what
    a query sees.

    Attributes:
        sink: First tokens, in whole blocks.
        recent: Last tokens that the first query of a chunk sees, its own included.
        block: Tokens to which a window's start is rounded.
        chunk: Tokens of a chunk, a multiple of ``block``.
        offset: Position, below ``chunk``, at which a chunk begins.
    """

    sink: int
    recent: int
    block: int
    chunk: int
    offset: int = 0

    @classmethod
    def of_tokens(cls, sink: int, recent: int, block: int) -> WindowRule:
        """Return the rule by which each query sees its own window, rounded to whole blocks: chunks begin where the
        rounded start changes.
        """
        return cls(sink, recent, block, block, (recent - 1) % block)

    def start(self, computed: int) -> int:
        """Return the first token of the window of the query that follows ``computed`` tokens; at least ``sink``."""
        chunk_start = (computed - self.offset) // self.chunk * self.chunk + self.offset
        return max(self.sink, (chunk_start - self.recent + 1) // self.block * self.block)

    @property
    def most_tokens(self) -> int:
        """The most keys that a query can see, and that a sequence holds between two steps."""
        rounded = (self.offset - self.recent + 1) % self.block
        return self.sink + self.recent - 1 + rounded + self.chunk


@dataclass(frozen=True)
class ServedPlan:
    """What each KV head of a model keeps.

    Attributes:
        model: Fields of the configuration of the model of the plan.
        windows: First and last tokens of each window.
        heads: Layers x KV heads: 0 keeps all tokens, i keeps ``windows[i - 1]``.
        block: Tokens of a block; None uses that of the engine.
        chunk: Tokens that see the same window; None gives each token its own.
    """

    model: Mapping[str, Any]
    windows: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, ...], ...]
    block: int | None = None
    chunk: int | None = None

    @classmethod
    def read(cls, data: Any) -> ServedPlan:
        """Return the plan of a configuration's field.

        Raises:
            ServedPlanError: The field is missing, of another version or damaged.
        """
        if not isinstance(data, Mapping):
            raise ServedPlanError(f"the configuration has no head_plan ({_shown(data)}). {_AGAIN}")
        if data.get("version") != VERSION:
            raise ServedPlanError(f"version of head_plan: {_shown(data.get('version'))} (limit {VERSION}). {_AGAIN}")
        names = set(data)
        if odd := (_FIELDS - names) | (names - _FIELDS - _OPTIONAL):
            raise ServedPlanError(f"head_plan lacks or should not have {', '.join(sorted(map(str, odd)))}. {_AGAIN}")
        if not isinstance(data["model"], Mapping):
            raise ServedPlanError(f"model of head_plan: {_shown(data['model'])} (limit fields by name). {_AGAIN}")
        windows = tuple(_window(each) for each in _rows(data["windows"], "windows"))
        heads = tuple(
            tuple(_kept(each, layer, len(windows)) for each in _rows(row, f"heads of layer {layer}"))
            for layer, row in enumerate(_rows(data["heads"], "heads"))
        )
        if not any(map(any, heads)):
            raise ServedPlanError("head_plan has no windows. Serve the model without it")
        block, chunk = (_positive(data.get(name), name) for name in ("block", "chunk"))
        return cls(dict(data["model"]), windows, heads, block, chunk)

    def check_model(self, config: Any) -> None:
        """Raise ServedPlanError if a configuration is that of another model."""
        for name, expected in self.model.items():
            found = getattr(config, name, None)
            if found != expected:
                raise ServedPlanError(
                    f"head_plan is for a model with {name} {_shown(expected)}; this one has {_shown(found)}. Make a"
                    " plan for this model"
                )
        layers = config.num_hidden_layers
        if len(self.heads) != layers:
            raise ServedPlanError(
                f"head_plan has {len(self.heads)} layers; this model has {layers}. Make a plan for this model"
            )

    def row(self, layer: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
        """Return what the KV heads of a layer keep on one of several tensor-parallel ranks, each of which has
        ``kv_heads``. Raise ServedPlanError if the model has another number of KV heads.
        """
        row = self.heads[layer]
        # Ranks share KV heads if there are more ranks than KV heads.
        if len(row) != kv_heads * ranks and (kv_heads != 1 or not row or ranks % len(row)):
            raise ServedPlanError(
                f"head_plan has {len(row)} KV heads in layer {layer}; this model has {kv_heads * ranks}. Make a plan"
                " for this model"
            )
        first = rank * len(row) // ranks
        return row[first : first + kv_heads]

    def heads_per_module(self, ranks: int) -> int:
        """Return the largest number of KV heads that divides how many of each kind each layer has on each rank. Modules
        of one size waste no memory, because vLLM's blocks have one size.
        """
        largest = 0
        for row in self.heads:
            local = max(1, len(row) // ranks)
            for first in range(0, len(row), local):
                part = row[first : first + local]
                largest = gcd(largest, *(part.count(kind) for kind in set(part)))
        return largest

    def freeing_modules(self, size: int, ranks: int, tokens: Mapping[int, int]) -> list[set[tuple[int, int]]]:
        """Return for each layer the kind, and the number within the kind, of the windowed modules that `freeing` gives
        blocks of their own, the same on all ranks.

        Args:
            size: KV heads of a module.
            tokens: Tokens that a sequence holds of each kind.
        """
        modules: dict[int, list[tuple[int, int]]] = {kind: [] for kind in range(1 + len(self.windows))}
        for layer, row in enumerate(self.heads):
            local = max(1, len(row) // ranks)
            parts = [row[first : first + local] for first in range(0, len(row), local)]
            for kind, places in modules.items():
                # vLLM counts a module that any rank has.
                most = max((part.count(kind) // size for part in parts), default=0)
                places += [(layer, number) for number in range(most)]
        found: list[set[tuple[int, int]]] = [set() for _ in self.heads]
        present = {kind: len(places) for kind, places in modules.items() if places or not kind}
        for kind, count in freeing(present, tokens).items():
            for layer, number in modules[kind][:count]:
                found[layer].add((kind, number))
        return found

    def rule(self, kept: int, block_size: int) -> WindowRule:
        """Return the rule of a window in an engine with blocks of ``block_size`` tokens.

        Raises:
            ServedPlanError: The engine's blocks are no part of the plan's.
        """
        block = self.block or block_size
        if block % block_size:
            raise ServedPlanError(
                f"blocks of {block_size} tokens in the engine, and of {block} in the plan (limit: a part of it). Serve"
                f" with --block-size {block}"
            )
        first, recent = self.windows[kept - 1]
        sink = -(-first // block) * block
        if self.chunk is None:
            return WindowRule.of_tokens(sink, recent, block)
        if self.chunk % block:
            raise ServedPlanError(
                f"chunk of head_plan: {self.chunk} (limit: a multiple of its block, {block}). {_AGAIN}"
            )
        return WindowRule(sink, recent, block, self.chunk)


def freeing(counts: Mapping[int, int], tokens: Mapping[int, int]) -> dict[int, int]:
    """Return how many attention modules of each window have blocks of their own, which they free. The other ones keep
    the blocks of all tokens with the full modules; what they attend to is the same.

    vLLM makes groups of equally many modules and pads the last group of each kind. 68 full and 22 windowed modules
    would be four and one group of 22, which waste 20 places; if 18 windowed ones free blocks, four and one group of 18
    waste none.

    Args:
        counts: Attention modules of each kind; kind 0 is full.
        tokens: Tokens that a sequence holds of each kind.
    """
    windows = [kind for kind in counts if kind]
    choices = []
    for size in range(1, 1 + max(counts[kind] for kind in windows)):
        own = {kind: counts[kind] // size * size for kind in windows}
        stored = {0: sum(counts.values()) - sum(own.values()), **own}
        together = _modules_of_a_group([count for count in stored.values() if count])
        groups = {kind: -(-count // together) for kind, count in stored.items()}
        held = together * sum(groups[kind] * tokens[kind] for kind in groups)
        choices.append((held, sum(groups.values()), own))
    least = min(held for held, _, _ in choices)
    # Each group costs time in every step.
    return min((each for each in choices if each[0] <= 1.05 * least), key=lambda each: each[1])[2]


def _modules_of_a_group(counts: Sequence[int]) -> int:
    """Return the attention modules of a group in vLLM, by the number of modules of each kind."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def modules_of(row: Sequence[int], size: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return what the KV heads of each module keep, and the KV heads, ``size`` of them, in order of the first head."""
    of_kind: dict[int, list[int]] = {}
    for head, kept in enumerate(row):
        of_kind.setdefault(kept, []).append(head)
    modules = [
        (kept, tuple(heads[first : first + size]))
        for kept, heads in of_kind.items()
        for first in range(0, len(heads), size)
    ]
    return tuple(sorted(modules, key=lambda module: module[1]))


def _rows(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ServedPlanError(f"{name} of head_plan: {_shown(value)} (limit a list). {_AGAIN}")
    return value


def _window(value: Any) -> tuple[int, int]:
    numbers = _rows(value, "a window")
    if len(numbers) != 2 or not all(map(_is_whole, numbers)) or numbers[0] < 0 or numbers[1] < 1:
        raise ServedPlanError(f"window of head_plan: {_shown(value)} (limit first tokens 0, last tokens 1). {_AGAIN}")
    return numbers[0], numbers[1]


def _kept(value: Any, layer: int, windows: int) -> int:
    if not _is_whole(value) or not 0 <= value <= windows:
        raise ServedPlanError(
            f"KV head of layer {layer} of head_plan: {_shown(value)} (limit 0 to {windows}). {_AGAIN}"
        )
    number: int = value
    return number


def _positive(value: Any, name: str) -> int | None:
    if value is not None and (not _is_whole(value) or value < 1):
        raise ServedPlanError(f"{name} of head_plan: {_shown(value)} (limit 1). {_AGAIN}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return repr(value)[:60]
