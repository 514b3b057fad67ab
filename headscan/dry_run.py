"""A forward pass without weights: what a model keeps in memory beside them, whatever its architecture.

On the meta device tensors have shapes and no contents, so that a pass of a model of any size takes about a second and
nothing is loaded. Every result of an operation is counted from when it is made until nobody holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from headscan.attention import IMPLEMENTATION, MASKED, PROBE, SESSION, attention_implementation, window_is_named
from headscan.calls import AttentionCall, ScoredCall, Session
from headscan.catalog import panel_names
from headscan.inputs import run
from headscan.outputs import OUTPUT_STATISTICS, output_statistics
from headscan.requests import AttentionRequest, MassWidths

_ATEN = torch.ops.aten
#: Tokens of the pass that tells how the model names its windows.
_FEW = 4
_ARGUMENTS = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True)
class DryRun:
    """What one sequence takes beside the weights, in bytes.

    Attributes:
        plain: Most that a forward pass without logits and without a KV cache keeps at one time.
        measured: Most that one keeps in which the fast panel is measured. It can be less, where the model's own
            attention makes explicit weights.
        cache: The KV cache, layer by layer; of layers that have none 0, or nothing at the end.
    """

    plain: int
    measured: int
    cache: tuple[int, ...]


@torch.no_grad()
def dry_run(model: PreTrainedModel, blocks: Sequence[str], tokens: int) -> DryRun:
    """Run a model on the meta device over one sequence.

    The panel is measured as on a CPU, whose fused call takes float32; a GPU's takes half precision and less memory.

    Blocks of one shape and kind take the same, so the pass runs the first ones alone, until every kind has run.

    Args:
        model: A model on the meta device; it is of no use afterwards.
        blocks: Names of its blocks, one for each layer.
        tokens: Length of the sequence.

    Raises:
        Exception: The model's own, where what it does depends on the contents of tensors.
    """
    model.config.pad_token_id = None  # some models look for padding among the ids, which here are none
    alike = _shorten(model, blocks)
    with _FusedAttention():
        with _Allocations(model) as plain:
            run(model, _inputs(model, tokens))
        cache = _cache_bytes(model, tokens, alike)
    windows = _Windows()
    with _answered(model, PROBE, windows), _Allocations(model):
        run(model, _inputs(model, _FEW))
    with _answered(model, IMPLEMENTATION if windows.named else MASKED, _Measuring()), _Allocations(model) as measured:
        run(model, _inputs(model, tokens))
    return DryRun(plain.peak, measured.peak, cache)


def _inputs(model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def _shorten(model: PreTrainedModel, blocks: Sequence[str]) -> list[int]:
    """Cut the lists of blocks short behind the last one that is of a new kind; for each layer the first of its kind."""
    types = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    kinds: dict[object, int] = {}
    alike = []
    for layer, name in enumerate(blocks):
        shapes = [(key, tuple(weight.shape)) for key, weight in model.get_submodule(name).named_parameters()]
        kind = (name.rpartition(".")[0], *types[layer : layer + 1], *shapes)
        alike.append(kinds.setdefault(kind, layer))
    for path in {name.rpartition(".")[0] for name in blocks}:
        kept = [int(blocks[layer].rpartition(".")[2]) for layer in alike if blocks[layer].startswith(f"{path}.")]
        parent, _, leaf = path.rpartition(".")
        # Two at least: what one block hands on stays while the next one runs.
        shortened = list(cast(nn.ModuleList, model.get_submodule(path)))[: max(2, *kept, *(i + 1 for i in kept))]
        setattr(model.get_submodule(parent), leaf, nn.ModuleList(shortened))
    return alike


def _cache_bytes(model: PreTrainedModel, tokens: int, alike: Sequence[int]) -> tuple[int, ...]:
    if model.config.is_encoder_decoder:
        return ()
    cache = DynamicCache(config=model.config.get_text_config())
    with _Allocations(model):
        run(model, {**_inputs(model, tokens), "past_key_values": cache, "use_cache": True})
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    kept = [sum(x.nbytes for x in pair if isinstance(x, Tensor)) for pair in pairs]
    # Layers that borrow the keys of others are the last ones, and the cache has no place for them.
    return tuple(kept[first] for first in alike[: len(kept)])


@contextmanager
def _answered(model: PreTrainedModel, implementation: str, session: Session) -> Iterator[None]:
    """Let a session answer whatever attention goes by the interface."""
    modules = list(model.modules())
    try:
        with attention_implementation(model, implementation):
            for module in modules:
                setattr(module, SESSION, session)
            yield
    finally:
        for module in modules:
            delattr(module, SESSION)


class _Windows:
    """Finds out whether calls name the windows that their masks are made for, as discovery does."""

    named = True

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.named &= not isinstance(call, ScoredCall) or window_is_named(call)
        return call.output()


class _Measuring:
    """Measures the fast panel at both doors."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        lengths = torch.ones(call.sequences, dtype=torch.long, device="meta")
        wanted = frozenset(panel_names("fast"))
        out, _ = call.measure(AttentionRequest(wanted - OUTPUT_STATISTICS, lengths, lengths, MassWidths()))
        gram = torch.empty(call.num_attention_heads, call.value_dim, call.value_dim, device="meta")
        output_statistics(out.transpose(1, 2), lengths, wanted & OUTPUT_STATISTICS, gram)
        return out


class _FusedAttention(TorchFunctionMode):
    """Answers attention as a fused kernel does, where one serves: the meta device knows explicit weights alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            query, key, value = given["query"], given["key"], given["value"]
            if key.shape[-1] == value.shape[-1]:
                # What the kernel makes of them before it starts: KV heads for all query heads, a mask of numbers.
                copies = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
                copies += [mask.to(query.dtype) for mask in (given.get("attn_mask"),) if mask is not None]
                return torch.empty_like(query)
        return func(*args, **kwargs)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all results that are alive, and answers what cannot be answered without contents.

    Attributes:
        peak: Most bytes that were alive at one time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        # Operations give views of weights, too, which take nothing.
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
