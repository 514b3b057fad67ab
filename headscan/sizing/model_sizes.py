"""Bytes of a model's weights, activations and KV cache before loading.

Weights are counted in the headers of the checkpoint; without a checkpoint, on the model that its configuration builds
on the meta device. Activations and KV cache come from passes on that device (`kv_cache`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.attention_request import AttentionRequest
from headscan.attention.calls import AttentionCall, ScoredCall, Session
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
from headscan.checkpoints.sources import load_config
from headscan.loading import check_dtype, empty_model
from headscan.models.forward_inputs import run
from headscan.models.layout import Layout, find_layout
from headscan.models.model_class import MODEL_ERRORS, first_line, is_encoder, raise_if_out_of_memory
from headscan.models.positions import max_tokens
from headscan.sizing.kv_cache import Allocations, FusedAttention, fill_caches, meta_inputs, shorten
from headscan.statistics.registry import OUTPUT_STATISTICS, output_statistics

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    """Return the bytes of loaded weights by part. None means that the tensors' names do not fit the model.

    A checkpoint's names may have another prefix than the model's (``h.0`` for ``transformer.h.0``), and it may contain
    other lists of blocks, such as a vision tower's.

    Args:
        dtype: Dtype of the loaded weights; None keeps the saved ones.
    """
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    prefixes = {path: _prefix_in(saved, path) for path in lists}
    if not lists or None in prefixes.values():
        return None
    found: Counter[int | str] = Counter()
    for name, tensor in saved.items():
        part = layout.part_of(_renamed(name, prefixes))
        if part == "rest" and any(name.startswith(f"{prefix}.") for prefix in prefixes.values()):
            continue  # a block after the last layer, which predicts a further token and is not loaded
        found[part] += tensor.nbytes if dtype is None else _loaded_bytes(tensor, dtype)
    if not all(found[index] for index in range(len(layout.blocks))):
        return None
    for part in ("embedding", "head"):
        if not found[part]:  # saved under another name
            found[part] = min(built[part], found["rest"])
            found["rest"] -= found[part]
    return found


def _prefix_in(saved: Mapping[str, SavedTensor], path: str) -> str | None:
    """Return the name of a list of blocks in a checkpoint. It is the largest list with the same last part of its
    name.
    """
    leaf = path.rpartition(".")[2]
    found: Counter[str] = Counter()
    for name, tensor in saved.items():
        parts = name.split(".")
        for place in range(1, len(parts)):
            if parts[place].isdecimal() and parts[place - 1] == leaf:
                found[".".join(parts[:place])] += tensor.nbytes
                break
    return path if path in found else found.most_common(1)[0][0] if found else None


def _renamed(name: str, prefixes: Mapping[str, str | None]) -> str:
    """Return a block tensor's name in the model. Other names stay as they are."""
    for path, prefix in prefixes.items():
        if prefix is not None and name.startswith(f"{prefix}."):
            return path + name[len(prefix) :]
    return name


def _loaded_bytes(tensor: SavedTensor, dtype: torch.dtype) -> int:
    return tensor.numel * dtype.itemsize if tensor.dtype in FLOATS else tensor.nbytes


def built_bytes(model: PreTrainedModel, layout: Layout, config: PreTrainedConfig) -> Counter[int | str]:
    """Return the bytes by part of a meta-device model, after quantisation."""
    found: Counter[int | str] = Counter()
    quantised = _quantised(model, config)
    for name, parameter in model.named_parameters():
        found[layout.part_of(name)] += quantised.get(name, parameter.nbytes)
    return found


def _quantised(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    """Return the bytes of quantised weights. They are the weights of linear layers and experts in blocks."""
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
    found = {}
    for path, module in model.named_modules():
        if module is head or any(path == name or name in path.split(".") for name in left_out):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 or (parameter.ndim == 2 and isinstance(module, nn.Linear)):
                found[f"{path}.{leaf}"] = int(parameter.numel() * bits / 8)
    return found


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


#: Tokens of the pass that detects how the model names its windows.
_FEW = 4


@dataclass(frozen=True)
class DryRun:
    """Peak bytes of one sequence in addition to weights and KV cache.

    Attributes:
        plain: Peak of a forward pass without logits.
        measured: Peak of a pass that measures the fast panel. It is lower than `plain` if the model's own attention
            computes explicit weights.
    """

    plain: int
    measured: int


@torch.no_grad()
def dry_run(model: PreTrainedModel, tokens: int) -> DryRun:
    """Run a model on the meta device over one sequence. The panel is measured as on a CPU, whose fused call runs in
    float32; a GPU's runs in half precision and needs less.

    Args:
        model: A model on the meta device, prepared by `kv_cache.shorten`.
        tokens: Length of the sequence.
    """
    with FusedAttention(), Allocations(model) as plain:
        run(model, meta_inputs(model, tokens))
    windows = _Windows()
    with _answered(model, PROBE, windows), Allocations(model):
        run(model, meta_inputs(model, _FEW))
    with _answered(model, IMPLEMENTATION if windows.named else MASKED, _Measuring()), Allocations(model) as measured:
        run(model, meta_inputs(model, tokens))
    return DryRun(plain.peak, measured.peak)


@contextmanager
def _answered(model: PreTrainedModel, implementation: str, session: Session) -> Iterator[None]:
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
        output_statistics(out.transpose(1, 2), lengths, wanted, factor)
        return out


_log = logging.getLogger("headscan")

#: Default length of the sequence for which activations are computed, in tokens.
_TOKENS = 2048
#: Activations in percent of the bytes of tensors: the margin covers allocators and kernels.
_WITH_MARGIN = 110


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model's parts, of its activations and its KV cache.

    Attributes:
        name: Folder or hub name.
        parameters: Number of parameters.
        embedding, head, rest: Bytes of the word embedding, of the output head (0 if it shares the embedding's weight)
            and of all other weights outside the blocks.
        blocks: Bytes of each block, one a layer; empty if the model has no list of blocks.
        tied: The head shares the embedding's weight.
        decoder: The model is a decoder, whose layers can run separately.
        hidden: Bytes of one token's hidden state.
        logits: Bytes of the logits of one token, with their float32 copy.
        tokens: Length of the sequence for `plain`, `measured` and `cache`.
        plain, measured: Peak bytes of a forward pass over one sequence in addition to the weights, without logits: of a
            plain pass, and of one that measures heads (see `DryRun`).
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
        """Number of blocks."""
        return len(self.blocks)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.embedding + sum(self.blocks) + self.head + self.rest

    def activation_bytes(self, tokens: int, *, measured: bool) -> int:
        """Return the bytes of a batch's activations.

        Args:
            tokens: Tokens of the whole batch.
            measured: The pass measures heads, for a scan or for a rule.
        """
        sequence = self.measured if measured else self.plain
        return -(-sequence * tokens * _WITH_MARGIN // (100 * self.tokens))

    def cache_bytes(self, tokens: int, first: int = 0, last: int | None = None) -> int:
        """Return the bytes of a batch's KV cache in some layers. They are ``first`` to ``last - 1``; None includes all
        above.
        """
        return -(-sum(self.cache[first:last]) * tokens // self.tokens)


def model_sizes(
    source: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokens: int = _TOKENS,
) -> ModelSizes:
    """Return the sizes of a model without loading a weight.

    Args:
        source: A folder with a configuration, with or without weights, a ``config.json`` alone, or a name on the hub.
        dtype: As for `headscan.load`. Quantised weights keep their dtype.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Allow Python code that comes with the model to run.
        tokens: Length of the sequences, at most the model's context.
    """
    source = os.fspath(source)
    asked = check_dtype(dtype)
    config = load_config(source, revision, trust_remote_code)
    saved = read_headers(source, revision)
    wanted = asked if isinstance(asked, torch.dtype) else saved_dtype(config, saved)
    model = empty_model(config, source, trust_remote_code, wanted)
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
        name=source,
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
    """Return a dry run and the bytes of each block's KV cache.

    A model whose code reads the contents of tensors cannot run without weights: its sizes are estimated, and the log
    says so. The cache of an encoder-decoder counts as 0, since no job keeps it between passes.
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
        cache = tuple(each.bytes(tokens) for each in caches[:layers]) or (0,) * layers
        return dry_run(model, tokens), cache
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        _log.info("activations of %s are estimated, not measured: %s", type(model).__name__, first_line(problem))
        ran, estimated = _estimated(tokens, widest, layers, model.dtype)
        return ran, estimated if cache is None else cache


def _estimated(tokens: int, width: int, layers: int, dtype: torch.dtype) -> tuple[DryRun, tuple[int, ...]]:
    """Return estimated sizes from the width of a block. A block keeps ``width`` numbers per token, four times in
    float32, and caches as many.
    """
    every = tokens * width
    return DryRun(16 * every, 16 * every), (every * dtype.itemsize,) * layers
