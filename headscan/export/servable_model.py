"""A Llama-type model, pruned or not, as engines that know one layout of attention hold it.

An engine holds K KV heads in a layer, each with the same number G of query heads. Where a layer has fewer heads than
the engine's layout, heads of zeros fill the places: their columns of the output projection are zero, so the layer's
output stays the same.

Shapes: E width of the hidden states, D width of a head, H query heads, K KV heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from shlex import quote
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscan.errors import ExportError
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.format.attention_parts import LayerHeads

#: Model types whose attention and MLP are those of Llama, up to biases.
LLAMA_TYPES = ("llama", "mistral", "qwen2")
#: What other families have that these formats lack.
_LACKING = {
    "qwen3": "norms of queries and keys",
    "smollm3": "layers without rotary positions",
    "granite": "multipliers of embedding, attention and residual",
}
#: Bytes of a number in the KV cache of an engine, which is 16 bits wide unless the user changes it.
_CACHE_NUMBER = 2


def obstacle(config: Any, source: str, engines: str = "serving engines") -> str | None:
    """Return why a model of a configuration has no place in the formats of ``engines``, and the fix; None if it has."""
    kind = getattr(config, "base_model_type", None) or config.model_type
    fix = "Serve the folder with transformers"
    if kind not in LLAMA_TYPES:
        lacking = f" has {_LACKING[kind]}, which have no place there" if kind in _LACKING else " has no place there"
        return f"{engines} hold models of type {', '.join(LLAMA_TYPES)}; {kind}{lacking}. {fix}"
    types = set(getattr(config, "layer_types", None) or ())
    window = None if types == {"full_attention"} else getattr(config, "sliding_window", None)
    if kind == "qwen2" and not config.use_sliding_window:
        window = None
    if window is not None and window < config.max_position_embeddings:
        return (
            f"{engines} would read all tokens where {source} has a sliding window: {window} tokens (limit: none). {fix}"
        )
    if config.hidden_act != "silu":
        return f"{engines} compute silu in the MLP; {source} has {config.hidden_act}. {fix}"
    return None


def serving_commands(folder: str, *, serves_itself: bool = False) -> dict[str, tuple[str, ...]]:
    """Return by engine the commands that serve a model without an `obstacle`. A folder that ``serves_itself`` has the
    code of pruned models and layers with groups of one size: vLLM reads it as it is, with its own KV heads.
    """
    name = folder.rstrip("/")
    model, gguf, served = (quote(f"{name}{ending}") for ending in ("", ".gguf", "-served"))
    commands: dict[str, tuple[str, ...]] = {
        "llama.cpp": (f"headscan export gguf {model} --out {gguf}", f"llama-server -m {gguf}"),
        "vLLM": (f"headscan export decilm {model} --out {served}", f"vllm serve {served} --trust-remote-code"),
    }
    if serves_itself:
        commands["vLLM, without an export"] = (f"vllm serve {model} --trust-remote-code --model-impl transformers",)
    return commands


def command_lines(commands: Mapping[str, Sequence[str]]) -> list[str]:
    """Return commands by engine as lines of a shell, each engine's below its name."""
    return [line for engine, of_engine in commands.items() for line in (f"# {engine}", *of_engine)]


class HeadSlots(NamedTuple):
    """The attention of a layer in an engine: its KV heads, and the query heads of each; 0 and 0 without attention."""

    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def own_slots(heads: Sequence[LayerHeads]) -> tuple[HeadSlots, ...]:
    """Return the smallest places that hold each layer, with groups as wide as the layer's widest. The first layer has
    at least one head, of zeros if need be: engines read the width of heads from it.
    """
    places = [HeadSlots(len(each.kept_kv), max(each.group_sizes, default=0)) for each in heads]
    return tuple(HeadSlots(1, 1) if at == 0 and not each.kv_heads else each for at, each in enumerate(places))


@dataclass(frozen=True)
class HeldSize:
    """What a form of a model holds; ``kv_bytes`` is the KV cache of a token in 16 bits."""

    model: str
    query_heads: int
    kv_heads: int
    attention_layers: int
    kv_bytes: int
    parameters: int


class ServedForm(NamedTuple):
    """A model in a format: the architecture that it names, its places by layer, its parameters, and their bytes."""

    architecture: str
    places: tuple[HeadSlots, ...]
    parameters: int
    bytes: int


class ServableModel:
    """A loaded model with its heads by layer; raises ExportError if the model has no place in ``engines``."""

    def __init__(self, lm: LoadedModel, engines: str) -> None:
        self.lm, self.engines = lm, engines
        self.model: Any = lm.model
        self.config: Any = lm.model.config
        if reason := obstacle(self.config, lm.source, engines):
            raise ExportError(reason)
        if getattr(self.model, "is_quantized", False):
            raise ExportError(f"{lm.source} has quantised weights. Export the model before it is quantised")

    @cached_property
    def heads(self) -> tuple[LayerHeads, ...]:
        """The heads of each layer, also those of layers that lost none."""
        whole = LayerHeads.all(self.config.num_attention_heads, self.config.num_key_value_heads)
        return tuple(getattr(layer.self_attn, "headscan_heads", None) or whole for layer in self.layers)

    @property
    def layers(self) -> Any:
        """The blocks of the model."""
        return self.model.model.layers

    @property
    def head_dim(self) -> int:
        width: int = (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        )
        return width

    @property
    def is_tied(self) -> bool:
        return self.model.lm_head.weight is self.model.model.embed_tokens.weight

    def attention(self, layer: int, places: HeadSlots) -> dict[str, Tensor]:
        """Return the weights and biases of a layer's projections by name, such as ``q_proj.weight`` (H * D, E), with
        zeros in the places without a head. A layer without attention whose places are not 0 gets zeros alone.
        """
        if not places.kv_heads:
            return {}
        heads, module = self.heads[layer], self.layers[layer].self_attn
        index = heads.kv_index
        queries = torch.tensor(
            [kv_head * places.group + index[:at].count(kv_head) for at, kv_head in enumerate(index)], dtype=torch.long
        )
        keys = torch.arange(len(heads.kept_kv))
        weights: dict[str, Tensor] = {}
        for name, at, count, dim in (
            ("q_proj", queries, places.heads, 0),
            ("k_proj", keys, places.kv_heads, 0),
            ("v_proj", keys, places.kv_heads, 0),
            ("o_proj", queries, places.heads, 1),
        ):
            projection = getattr(module, name, None)
            if projection is None:
                width, E = count * self.head_dim, self.config.hidden_size
                weights[f"{name}.weight"] = self.zeros(*((E, width) if dim else (width, E)))
                continue
            weights[f"{name}.weight"] = self._spread(projection.weight, at, count, dim)
            if projection.bias is not None:
                bias = projection.bias.detach()
                weights[f"{name}.bias"] = bias if dim else self._spread(bias, at, count, 0)
        if not heads.kept and module.bias is not None:
            weights["o_proj.bias"] = module.bias.detach()
        return weights

    def _spread(self, weight: Tensor, at: Tensor, count: int, dim: int) -> Tensor:
        """Return a weight whose heads, neighbours along ``dim``, lie at the places ``at`` of ``count``."""
        if at.tolist() == list(range(count)):
            return weight.detach()
        heads = weight.detach().unflatten(dim, (-1, self.head_dim))
        shape = [count if each == dim else size for each, size in enumerate(heads.shape)]
        return heads.new_zeros(shape).index_copy(dim, at.to(heads.device), heads).flatten(dim, dim + 1)

    def mlp(self, layer: int, places: Sequence[HeadSlots]) -> dict[str, Tensor]:
        """Return the weights and biases of a layer's MLP by name.

        The bias that a layer without attention still adds becomes a part of the last bias before it. That leaves the
        model the same, because nothing reads the hidden states in between.
        """
        weights = {name: value.detach() for name, value in self.layers[layer].mlp.named_parameters()}
        following = layer + 1
        if following < len(self.heads) and not places[following].kv_heads:
            bias = self.layers[following].self_attn.bias
            if bias is not None:
                weights["down_proj.bias"] = weights.get("down_proj.bias", 0) + bias.detach()
        return weights

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.model.dtype)

    def own_slots(self) -> tuple[HeadSlots, ...]:
        """Return `own_slots` of the model's heads."""
        return own_slots(self.heads)

    def sizes(self, name: str, places: Sequence[HeadSlots], parameters: int) -> list[HeldSize]:
        """Return what the original, this model and its form with some places and ``parameters`` hold."""
        own = sum(each.numel() for each in self.model.parameters())
        mine = [HeadSlots(len(each.kept_kv), 0) for each in self.heads]
        queries = [len(each.kept) for each in self.heads]
        before = [(each.heads, each.kv_heads) for each in self.heads]
        held = [(each.heads, each.kv_heads) for each in places]
        now = list(zip(queries, (each.kv_heads for each in mine), strict=True))
        original, this = (
            self._size(label, each, own, now) for label, each in (("original", before), ("this model", now))
        )
        return [original, this, replace(self._size(name, held, own, now), parameters=parameters)]

    def _size(self, name: str, held: Sequence[tuple[int, int]], own: int, now: Sequence[tuple[int, int]]) -> HeldSize:
        query, kv = (sum(counts) for counts in zip(*held, strict=True))
        fewer_query, fewer_kv = (sum(counts) for counts in zip(*now, strict=True))
        D, E = self.head_dim, self.config.hidden_size
        more = 2 * D * E * ((query - fewer_query) + (kv - fewer_kv))
        return HeldSize(name, query, kv, sum(heads > 0 for heads, _ in held), 2 * D * kv * _CACHE_NUMBER, own + more)
