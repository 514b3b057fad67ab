"""Bytes of a model's weights, activations and KV cache before loading.

Weights are counted in the headers of the checkpoint; without a checkpoint, on the model that its configuration builds
on the meta device. Activations and KV cache come from passes on that device, whose tensors have no contents: a model
of any size runs in seconds, and every result of an operation is counted until it is freed. The model's own cache shows
what head shapes do not: a latent cache (MLA), a cache shared between layers, a window, keys stored for every query
head.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from headscan.attention.calls import AttentionCall, AttentionSession, ScoredCall
from headscan.attention.hooks import (
    IMPLEMENTATION,
    MASKED,
    PROBE,
    attention_implementation,
    open_session,
    window_is_named,
)
from headscan.catalog import MassWidths, panel_names
from headscan.checkpoints.headers import FLOATS, SavedTensor, read_headers
from headscan.errors import UnsupportedModelError
from headscan.loading import check_dtype, empty_model
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import TokenMeans, run_forward
from headscan.models.loaded_model import Layout, find_layout
from headscan.models.model_facts import MODEL_ERRORS, is_encoder, max_tokens, raise_if_out_of_memory, typed_line
from headscan.statistics.registry import OUTPUT_STATISTICS, output_statistics
from headscan.statistics.weight_statistics import AttentionRequest

_ATEN = torch.ops.aten
_ARGUMENTS = ("query", "key", "value", "attn_mask")


def meta_inputs(model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
    """Return the inputs of a forward pass over one sequence."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def shorten(model: PreTrainedModel, blocks: Sequence[str]) -> list[int]:
    """Shorten a model's block lists after the last new kind; return for each layer the first of its kind, which still
    runs.

    Blocks of equal shape, kind and cache take the same memory, so only the first of each kind has to run. The model, on
    the meta device, cannot be used for anything else afterwards.
    """
    model.config.pad_token_id = None  # some models search for padding ids, which meta tensors do not have
    config = model.config.get_text_config()
    types = list(getattr(config, "layer_types", None) or ())
    caches = [] if model.config.is_encoder_decoder else DynamicCache(config=config).layers
    kinds: dict[object, int] = {}
    substitutes = []
    for layer, name in enumerate(blocks):
        shapes = [(key, tuple(weight.shape)) for key, weight in model.get_submodule(name).named_parameters()]
        cache = [(type(cached).__name__, cached.get_max_length()) for cached in caches[layer : layer + 1]]
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
    """A mode that replaces attention by a fused kernel's allocations; the meta device has explicit weights only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            query, key, value = given["query"], given["key"], given["value"]
            if key.shape[-1] == value.shape[-1]:
                # Copies that precede the kernel: KV heads repeated for all query heads, and a numeric mask.
                copies = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
                copies += [mask.to(query.dtype) for mask in (given.get("attn_mask"),) if mask is not None]
                if torch.is_grad_enabled() and query.requires_grad:
                    return _FusedWithGraph.apply(query, key, value)
                return torch.empty_like(query)
        return func(*args, **kwargs)


class _FusedWithGraph(torch.autograd.Function):
    """A fused kernel's allocations with a graph: its inputs, its output and one number of each query stay."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(saved.new_empty(saved.shape) for saved in ctx.saved_tensors[:3])


class Allocations(TorchDispatchMode):
    """A mode that counts the bytes of all live results and their peak; reads of contents return fixed values."""

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


#: Tokens of a short pass, fewer than any window, and of a continuation that is longer than any window.
_FEW, _MANY = 4, 1 << 24


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of one attention, for one sequence.

    Attributes:
        heads: Size of the head axis: KV heads, a multiple of them if keys are stored for each query head, 1 if all
            heads share a latent, 0 if the layer has no cache.
        bytes_per_token: All heads together.
        tokens: Largest number of tokens that it keeps; None means no limit.
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
    """Return each layer's KV cache of a loaded model, without running, by kind of site; empty for an encoder."""
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
    """Return each layer's KV cache of a model on the meta device, where `substitutes` of `shorten` run, if any."""
    try:
        with FusedAttention(), Allocations(model):
            cache = getattr(
                run_forward(model, {**meta_inputs(model, _FEW), "use_cache": True}), "past_key_values", None
            )
        if cache is None:
            return {}
        if isinstance(cache, EncoderDecoderCache):
            return {"self": _layers(cache.self_attention_cache), "cross": _layers(cache.cross_attention_cache)}
        return {"self": _layers(cache, substitutes)}
    except MODEL_ERRORS as problem:
        raise _unknown(model, problem) from problem


def _layers(cache: Any, substitutes: Sequence[int] | None = None) -> tuple[LayerCache, ...]:
    caches = [_layer(layer) for layer in cache.layers]
    # A cache may have no entries for the last layers.
    return tuple(caches) if not substitutes else tuple(caches[i] if i < len(caches) else NO_CACHE for i in substitutes)


def _layer(layer: Any) -> LayerCache:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not keys.numel():
        return NO_CACHE
    held, tokens = (keys, values, getattr(layer, "indexer_keys", None)), keys.shape[-2]
    per_token = sum(state.nbytes for state in held if isinstance(state, Tensor)) // tokens
    heads, width = keys.shape[1], keys.shape[-1]
    layer.update(*(state.new_empty(*state.shape[:-2], _MANY, state.shape[-1]) for state in (keys, values)))
    kept = layer.keys.shape[-2]
    return LayerCache(heads, per_token, None if kept == tokens + _MANY else kept, width)


def _unknown(model: PreTrainedModel, problem: Exception) -> UnsupportedModelError:
    raise_if_out_of_memory(problem)
    return UnsupportedModelError(
        f"the KV cache of {type(model).__name__} cannot be sized on the meta device: {typed_line(problem)}. Load "
        "another model"
    )


_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def loaded_dtype(spec: ModelSpec, config: PreTrainedConfig, saved: Mapping[str, SavedTensor]) -> torch.dtype:
    """Return the dtype in which a model is loaded."""
    asked = check_dtype(spec.dtype)
    return asked if isinstance(asked, torch.dtype) else saved_dtype(config, saved)


def saved_dtype(config: PreTrainedConfig, saved: Mapping[str, SavedTensor]) -> torch.dtype:
    """Return the dtype of ``dtype="auto"``: the configuration's, or else the checkpoint's."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    floats: Counter[str] = Counter()
    for tensor in saved.values():
        if tensor.dtype in FLOATS:
            floats[tensor.dtype] += tensor.nbytes
    return _TORCH[floats.most_common(1)[0][0]] if floats else torch.get_default_dtype()


def saved_bytes(
    layout: Layout, saved: Mapping[str, SavedTensor], dtype: torch.dtype | None, built: Counter[int | str]
) -> Counter[int | str] | None:
    """Return the bytes of loaded weights by part; a dtype of None keeps the saved ones.

    None means that the tensors' names do not fit the model. A checkpoint's names may have another prefix than the
    model's (``h.0`` for ``transformer.h.0``), and it may contain other lists of blocks, such as a vision tower's.
    """
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    prefixes = {path: _prefix_in(saved, path) for path in lists}
    if not lists or None in prefixes.values():
        return None
    sizes: Counter[int | str] = Counter()
    for name, tensor in saved.items():
        part = layout.part_of(_renamed(name, prefixes))
        if part == "rest" and any(name.startswith(f"{prefix}.") for prefix in prefixes.values()):
            continue  # a block after the last layer, which predicts a further token and is not loaded
        converted = dtype if tensor.dtype in FLOATS else None
        sizes[part] += tensor.nbytes if converted is None else tensor.numel * converted.itemsize
    if not all(sizes[index] for index in range(len(layout.blocks))):
        return None
    for part in ("embedding", "head"):
        if not sizes[part]:  # saved under another name
            sizes[part] = min(built[part], sizes["rest"])
            sizes["rest"] -= sizes[part]
    return sizes


def _prefix_in(saved: Mapping[str, SavedTensor], path: str) -> str | None:
    """Return the name of a list of blocks in a checkpoint: the largest with the same last part of its name."""
    leaf = path.rpartition(".")[2]
    prefixes: Counter[str] = Counter()
    for name, tensor in saved.items():
        parts = name.split(".")
        for place in range(1, len(parts)):
            if parts[place].isdecimal() and parts[place - 1] == leaf:
                prefixes[".".join(parts[:place])] += tensor.nbytes
                break
    return path if path in prefixes else prefixes.most_common(1)[0][0] if prefixes else None


def _renamed(name: str, prefixes: Mapping[str, str | None]) -> str:
    """Return a block tensor's name in the model. Other names stay as they are."""
    for path, prefix in prefixes.items():
        if prefix is not None and name.startswith(f"{prefix}."):
            return path + name[len(prefix) :]
    return name


def built_bytes(model: PreTrainedModel, layout: Layout, config: PreTrainedConfig) -> Counter[int | str]:
    """Return the bytes by part of a meta-device model, after quantisation."""
    sizes: Counter[int | str] = Counter()
    quantised = _quantised(model, config)
    for name, parameter in model.named_parameters():
        sizes[layout.part_of(name)] += quantised.get(name, parameter.nbytes)
    return sizes


def _quantised(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    """Return the bytes of quantised weights, which are those of linear layers and experts in blocks."""
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    bits = _bits(settings)
    if bits is None:
        return {}
    left_out = [
        *(settings.get("modules_to_not_convert") or ()),
        *(settings.get("llm_int8_skip_modules") or ()),
        *(settings.get("ignore") or ()),
    ]
    head = model.get_output_embeddings()
    sizes = {}
    for path, module in model.named_modules():
        if module is head or any(path == name or name in path.split(".") for name in left_out):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 or (parameter.ndim == 2 and isinstance(module, nn.Linear)):
                sizes[f"{path}.{leaf}"] = int(parameter.numel() * bits / 8)
    return sizes


def _bits(settings: Mapping[str, Any]) -> float | None:
    """Return the bits of a quantised weight, including its scales. None means no quantisation, or an unknown one."""
    method = settings.get("quant_method")
    if method == "fp8" and (block := settings.get("weight_block_size")):
        return 8 + 32 / (block[0] * block[1])
    if method == "mxfp4":
        return 4 + 8 / 32
    if method == "bitsandbytes":
        return 4.5 if settings.get("load_in_4bit") else 8
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        return max((group.get("num_bits") or 16 for group in groups), default=None)
    if "bits" in settings:
        return settings["bits"] + 32 / (settings.get("group_size") or 128)
    return 8 if method in ("fp8", "fbgemm_fp8") else None


@dataclass(frozen=True)
class DryRun:
    """Peak bytes of one sequence in addition to weights and KV cache: of a plain pass without logits, and of one that
    measures the fast panel, which is lower if the model's own attention computes explicit weights.
    """

    plain: int
    measured: int


#: Longest sequence whose panel is measured: its blocks of queries take minutes at 32,768 tokens.
_PANEL_TOKENS = 4096


@torch.no_grad()
def dry_run(model: PreTrainedModel, tokens: int) -> DryRun:
    """Run a model that `shorten` prepared over one sequence on the meta device. The panel is measured as on a CPU,
    whose fused call runs in float32; a GPU's runs in half precision and needs less. Of longer sequences than
    `_PANEL_TOKENS`, the panel's bytes follow from a shorter one, because they are linear in the length.
    """
    with FusedAttention(), Allocations(model) as plain:
        run_forward(model, meta_inputs(model, tokens))
    if tokens > _PANEL_TOKENS:
        short = dry_run(model, _PANEL_TOKENS)
        # Where the model's own attention computes explicit weights, the panel replaces them.
        own = plain.peak if short.measured >= short.plain else 0
        panel = short.measured - short.plain if own else short.measured
        return DryRun(plain.peak, own + panel * tokens // _PANEL_TOKENS)
    windows = _Windows()
    with _answered(model, PROBE, windows), Allocations(model):
        run_forward(model, meta_inputs(model, _FEW))
    with _answered(model, IMPLEMENTATION if windows.named else MASKED, _Measuring()), Allocations(model) as measured:
        run_forward(model, meta_inputs(model, tokens))
    return DryRun(plain.peak, measured.peak)


@contextmanager
def _answered(model: PreTrainedModel, implementation: str, session: AttentionSession) -> Iterator[None]:
    """Let a session answer all attention calls that use the interface."""
    with attention_implementation(model, implementation), open_session(model.modules(), session):
        yield


class _Windows:
    """A session that detects whether calls name their masks' windows."""

    named = True

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.named &= not isinstance(call, ScoredCall) or window_is_named(call)
        return call.output()


class _Measuring:
    """A session that measures the fast panel at both hooks."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        lengths = torch.ones(call.sequences, dtype=torch.long, device="meta")
        wanted = frozenset(panel_names("fast"))
        out, _ = call.measure(AttentionRequest(wanted - OUTPUT_STATISTICS.keys(), lengths, lengths, MassWidths()))
        factor = torch.empty(call.num_attention_heads, call.value_dim, call.value_dim, device="meta")
        output_statistics(out.transpose(1, 2), TokenMeans(lengths), wanted, factor)
        return out


_log = logging.getLogger("headscan")

#: Default length of the sequence for which activations are computed, in tokens.
_TOKENS = 2048
#: Activations in percent of the bytes of tensors: the margin covers allocators and kernels.
WITH_MARGIN = 110


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model's parts, of its activations and its KV cache.

    Attributes:
        embedding, head, rest: Bytes of the word embedding, of the output head (0 if it shares the embedding's weight)
            and of all other weights outside the blocks.
        blocks: Bytes of each block, one a layer; empty if the model has no list of blocks.
        decoder: The model is a decoder, whose layers can run separately.
        hidden: Bytes of one token's hidden state.
        logits: Bytes of the logits of one token, with their float32 copy.
        tokens: Length of the sequence for `plain`, `measured` and `cache`.
        plain, measured: As in `DryRun`.
        cache: Bytes of one sequence's KV cache by layer; 0 for layers without one.
    """

    name: str
    parameters: int
    embedding: int
    blocks: tuple[int, ...]
    head: int
    rest: int
    tied: bool
    decoder: bool
    hidden: int
    logits: int
    tokens: int
    plain: int
    measured: int
    cache: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def weights(self) -> int:
        return self.embedding + sum(self.blocks) + self.head + self.rest

    def activation_bytes(self, tokens: int, *, measured: bool) -> int:
        """Return the bytes of the activations of a batch of so many tokens, in a pass that measures heads or not."""
        sequence = self.measured if measured else self.plain
        return -(-sequence * tokens * WITH_MARGIN // (100 * self.tokens))

    def cache_bytes(self, tokens: int, first: int = 0, last: int | None = None) -> int:
        """Return the bytes of a batch's KV cache in the layers ``first`` to ``last - 1``; None includes all above."""
        return -(-sum(self.cache[first:last]) * tokens // self.tokens)


def model_sizes(spec: ModelSpec, tokens: int = _TOKENS) -> ModelSizes:
    """Return the sizes of a model without loading a weight, for sequences of some length, at most the model's context.
    The source is a folder with a configuration, with or without weights, a ``config.json``, or a name on the hub.
    """
    config = spec.config()
    saved = read_headers(spec.folder, spec.revision)
    wanted = loaded_dtype(spec, config, saved)
    model = empty_model(spec, config, wanted)
    layout = find_layout(model)
    quantised = getattr(config, "quantization_config", None) is not None
    built = built_bytes(model, layout, config)
    parts = saved_bytes(layout, saved, None if quantised else wanted, built) or built
    tokens = min(tokens, max_tokens(config) or tokens)
    words: Any = model.get_input_embeddings()
    vocabulary, hidden = words.weight.shape
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ran, cache = _ran(model, layout, tokens)
    return ModelSizes(
        name=spec.folder,
        parameters=parameters,
        embedding=parts["embedding"],
        blocks=tuple(parts[index] for index in range(len(layout.blocks))),
        head=0 if layout.tied else parts["head"],
        rest=parts["rest"],
        tied=layout.tied,
        decoder=not config.is_encoder_decoder and not is_encoder(config),
        hidden=hidden * wanted.itemsize,
        logits=vocabulary * (wanted.itemsize + 4),
        tokens=tokens,
        plain=ran.plain,
        measured=ran.measured,
        cache=cache,
    )


def _ran(model: PreTrainedModel, layout: Layout, tokens: int) -> tuple[DryRun, tuple[int, ...]]:
    """Return a dry run and the bytes of each block's KV cache; that of an encoder-decoder counts as 0, since no job
    keeps it.

    A model whose code reads the contents of tensors cannot run without weights: its sizes are estimated and logged so.
    """
    widths = Counter[int | str]()
    for name, parameter in model.named_parameters():
        widths[layout.part_of(name)] += parameter.shape[-2] if parameter.ndim > 1 else 0
    layers = len(layout.blocks)
    widest = max((widths[index] for index in range(layers)), default=0)
    cache: tuple[int, ...] | None = None
    try:
        substitutes = shorten(model, layout.blocks)
        caches = () if model.config.is_encoder_decoder else fill_caches(model, substitutes).get("self", ())
        cache = tuple(layer.bytes(tokens) for layer in caches[:layers]) or (0,) * layers
        return dry_run(model, tokens), cache
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        _log.info("activations of %s are estimated, not measured: %s", type(model).__name__, typed_line(problem))
        ran, estimated = _estimated(tokens, widest, layers, model.dtype)
        return ran, estimated if cache is None else cache


def _estimated(tokens: int, width: int, layers: int, dtype: torch.dtype) -> tuple[DryRun, tuple[int, ...]]:
    """Return estimated sizes: a block keeps ``width`` numbers per token, four times in float32, and caches as many."""
    every = tokens * width
    return DryRun(16 * every, 16 * every), (every * dtype.itemsize,) * layers
