"""Forward passes on the meta device, whose tensors have no contents.

A model of any size runs in seconds.

Every result of an operation is counted until it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

_ATEN = torch.ops.aten
_ARGUMENTS = ("query", "key", "value", "attn_mask")


def meta_inputs(model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
    """Return the inputs of a forward pass over one sequence."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def shorten(model: PreTrainedModel, blocks: Sequence[str]) -> list[int]:
    """Shorten a model's block lists after the last new kind.

    Blocks of equal shape, kind and cache take the same memory, so only the first of each kind has to run. The model
    cannot be used for anything else afterwards.

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
    """A mode that replaces attention by a fused kernel's allocations.

    The meta device itself only has explicit weights.
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
    """A mode that counts the bytes of all live results.

    Reads of contents return fixed values.

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
