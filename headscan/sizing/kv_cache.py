"""Forward passes on the meta device, whose tensors have no contents, and the sizes of a KV cache that they show.

A model of any size runs in seconds, and every result of an operation is counted until it is freed. The model's own
cache shows what head shapes do not: a latent cache (MLA), a cache shared between layers, a window, keys stored for
every query head.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from headscan.errors import UnsupportedModelError
from headscan.models.forward_inputs import run
from headscan.models.layout import find_layout
from headscan.models.model_class import MODEL_ERRORS, first_line, raise_if_out_of_memory

_ATEN = torch.ops.aten
_ARGUMENTS = ("query", "key", "value", "attn_mask")


def meta_inputs(model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
    """Return the inputs of a forward pass over one sequence."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def shorten(model: PreTrainedModel, blocks: Sequence[str]) -> list[int]:
    """Shorten a model's block lists after the last new kind. Blocks of equal shape, kind and cache take the same
    memory, so only the first of each kind has to run. The model cannot be used for anything else afterwards.

    Args:
        model: A model on the meta device.
        blocks: Names of its blocks, one a layer.

    Returns:
        For each layer the first layer of its kind, which still runs.
    """
    model.config.pad_token_id = None  # some models search for padding ids, which meta tensors do not have
    config = model.config.get_text_config()
    types = list(getattr(config, "layer_types", None) or ())
    caches = [] if model.config.is_encoder_decoder else DynamicCache(config=config).layers
    kinds: dict[object, int] = {}
    substitutes = []
    for layer, name in enumerate(blocks):
        shapes = [(key, tuple(weight.shape)) for key, weight in model.get_submodule(name).named_parameters()]
        cache = [(type(each).__name__, each.get_max_length()) for each in caches[layer : layer + 1]]
        kind = (name.rpartition(".")[0], *types[layer : layer + 1], *cache, *shapes)
        substitutes.append(kinds.setdefault(kind, layer))
    for path in {name.rpartition(".")[0] for name in blocks}:
        kept = [int(blocks[layer].rpartition(".")[2]) for layer in substitutes if blocks[layer].startswith(f"{path}.")]
        parent, _, leaf = path.rpartition(".")
        # At least two blocks: the output of one is still in memory while the next one runs.
        shortened = list(cast(nn.ModuleList, model.get_submodule(path)))[: max(2, *kept, *(i + 1 for i in kept))]
        setattr(model.get_submodule(parent), leaf, nn.ModuleList(shortened))
    return substitutes


class FusedAttention(TorchFunctionMode):
    """A mode that replaces attention by a fused kernel's allocations. The meta device itself only has explicit
    weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            query, key, value = given["query"], given["key"], given["value"]
            if key.shape[-1] == value.shape[-1]:
                # Copies that precede the kernel: KV heads repeated for all query heads, and a numeric mask.
                copies = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
                copies += [mask.to(query.dtype) for mask in (given.get("attn_mask"),) if mask is not None]
                return torch.empty_like(query)
        return func(*args, **kwargs)


class Allocations(TorchDispatchMode):
    """A mode that counts the bytes of all live results. Reads of contents return fixed values.

    Attributes:
        peak: Peak of the bytes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        # Views of weights take no memory.
        weights = (*model.parameters(), *model.buffers())
        self._alive = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._local_scalar_dense.default:
            return 1  # "are all tokens real?": yes
        if func is _ATEN.nonzero.default:
            out = args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.long)  # at most
        elif func is _ATEN._grouped_mm.default:  # its meta kernel refuses float32, which the CPU's takes
            out = args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._alive:
            return
        self._alive.add(name)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._release, name, size)

    def _release(self, name: int, size: int) -> None:
        self._alive.discard(name)
        self._bytes -= size


#: Tokens of the pass, fewer than any window, and of a continuation that is longer than any window.
_FEW, _MANY = 4, 1 << 24


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of one attention, for one sequence.

    Attributes:
        heads: Size of the head axis: KV heads, a multiple of them if keys are stored for each query head, 1 if all
            heads share a latent, 0 if the layer has no cache.
        bytes_per_token: Bytes of one token, all heads together.
        tokens: Largest number of tokens that it keeps; None means no limit.
        key_dim: Width of a cached key.
    """

    heads: int
    bytes_per_token: int
    tokens: int | None
    key_dim: int

    def bytes(self, tokens: int) -> int:
        """Return the bytes after ``tokens`` tokens."""
        return self.bytes_per_token * (tokens if self.tokens is None else min(tokens, self.tokens))


#: The cache of a layer that uses another layer's cache, or none.
NO_CACHE = LayerCache(0, 0, None, 0)


def find_caches(model: PreTrainedModel) -> dict[str, tuple[LayerCache, ...]]:
    """Return each layer's KV cache of a loaded model, without running.

    Returns:
        One entry a layer, by kind of site: ``self``, and ``cross`` in encoder-decoders. Empty for an encoder.
    """
    config = copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            twin = type(model)._from_config(config, dtype=model.dtype).eval()
        substitutes = None if config.is_encoder_decoder else shorten(twin, find_layout(twin).blocks)
    except MODEL_ERRORS as problem:
        raise _unknown(model, problem) from problem
    return fill_caches(twin, substitutes)


@torch.no_grad()
def fill_caches(model: PreTrainedModel, substitutes: Sequence[int] | None = None) -> dict[str, tuple[LayerCache, ...]]:
    """Return each layer's KV cache of a model on the meta device.

    Args:
        substitutes: For each layer the one that runs instead of it, see `shorten`; None runs all.
    """
    try:
        with FusedAttention(), Allocations(model):
            cache = getattr(run(model, {**meta_inputs(model, _FEW), "use_cache": True}), "past_key_values", None)
        if cache is None:
            return {}
        if isinstance(cache, EncoderDecoderCache):
            return {"self": _layers(cache.self_attention_cache), "cross": _layers(cache.cross_attention_cache)}
        return {"self": _layers(cache, substitutes)}
    except MODEL_ERRORS as problem:
        raise _unknown(model, problem) from problem


def _layers(cache: Any, substitutes: Sequence[int] | None = None) -> tuple[LayerCache, ...]:
    found = [_layer(layer) for layer in cache.layers]
    # A cache may have no entries for the last layers.
    return tuple(found) if not substitutes else tuple(found[i] if i < len(found) else NO_CACHE for i in substitutes)


def _layer(layer: Any) -> LayerCache:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not keys.numel():
        return NO_CACHE
    held, tokens = (keys, values, getattr(layer, "indexer_keys", None)), keys.shape[-2]
    per_token = sum(each.nbytes for each in held if isinstance(each, Tensor)) // tokens
    heads, width = keys.shape[1], keys.shape[-1]
    layer.update(*(each.new_empty(*each.shape[:-2], _MANY, each.shape[-1]) for each in (keys, values)))
    kept = layer.keys.shape[-2]
    return LayerCache(heads, per_token, None if kept == tokens + _MANY else kept, width)


def _unknown(model: PreTrainedModel, problem: Exception) -> UnsupportedModelError:
    raise_if_out_of_memory(problem)
    return UnsupportedModelError(
        f"the KV cache of {type(model).__name__} cannot be sized on the meta device: {first_line(problem)}. Load "
        "another model"
    )
