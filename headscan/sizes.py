"""What a model weighs, part by part, and what it keeps in memory while it runs: known before a weight is loaded.

Weights are counted in the headers of the checkpoint, or, where there is a configuration alone, on the model that is
built from it on the meta device. What a pass takes beside them is seen in a pass on that device (`headscan.dry_run`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscan.dry_run import DryRun, dry_run
from headscan.headers import FLOATS, SavedTensor, read_headers
from headscan.layout import Layout, find_layout
from headscan.loading import check_dtype, empty_model, is_encoder, load_config, max_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Tokens of the sequence that activations are worked out for, unless told otherwise.
_TOKENS = 2048
#: Activations in percent of what tensors alone take: allocators and kernels need something of their own.
_WITH_MARGIN = 110
_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model's parts, and of what it keeps while it runs.

    Attributes:
        name: Folder or hub name.
        parameters: How many numbers the model has.
        embedding, head, rest: Bytes of the word embedding, of the output head (0 where it is the embedding's weight
            again) and of what is neither these nor a block.
        blocks: Bytes of each block, one for each layer; none where the model is no list of blocks.
        tied: The head's weight is the embedding's.
        decoder: It is a decoder alone, whose layers can run apart from each other.
        hidden: Bytes of one token's hidden state.
        logits: Bytes of the logits at one place, with the float32 copy that probabilities are taken from.
        tokens: Length of the sequence that the following are for.
        plain, measured: Bytes that a forward pass over one sequence keeps beside the weights, without logits, and that
            it keeps while heads are measured (see `headscan.dry_run.DryRun`).
        cache: Bytes of one sequence's KV cache, layer by layer; of layers that have none 0.
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
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def weights(self) -> int:
        """Bytes of the whole model."""
        return self.embedding + sum(self.blocks) + self.head + self.rest

    def activation_bytes(self, tokens: int, *, measured: bool, logit_places: int = 0) -> int:
        """What a batch of sequences of `tokens` tokens takes beside the weights.

        Args:
            tokens: Of the whole batch.
            measured: Heads are measured, also, by a rule.
            logit_places: Places whose logits are wanted at one time.
        """
        sequence = self.measured if measured else self.plain
        return -(-sequence * tokens * _WITH_MARGIN // (100 * self.tokens)) + logit_places * self.logits

    def cache_bytes(self, tokens: int, first: int = 0, last: int | None = None) -> int:
        """The KV cache of the layers ``first`` to ``last - 1``, of a batch of so many tokens."""
        return -(-sum(self.cache[first:last]) * tokens // self.tokens)


def model_sizes(
    source: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokens: int = _TOKENS,
) -> ModelSizes:
    """Find the sizes of a model without loading a weight.

    Args:
        source: A folder with a configuration, with or without weights, a ``config.json`` alone, or a name on the hub.
        dtype: As for `headscan.load`. Quantised weights stay as they are saved.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Allow Python code that comes with the model to run.
        tokens: Length of the sequences to come; the model's context, where that is shorter.

    Raises:
        ModelLoadError: There is no such model, or it is none of text.
    """
    source = os.fspath(source)
    asked = check_dtype(dtype)
    config = load_config(source, revision, trust_remote_code)
    saved = read_headers(source, revision)
    wanted = asked if isinstance(asked, torch.dtype) else _saved_dtype(config, saved)
    model = empty_model(config, source, trust_remote_code, wanted)
    layout = find_layout(model)
    quantised = getattr(config, "quantization_config", None) is not None
    built = _built_bytes(model, layout, config)
    parts = _saved_bytes(layout, saved, None if quantised else wanted, built) or built
    tokens = min(tokens, max_tokens(config) or tokens)
    words: Any = model.get_input_embeddings()
    vocabulary, hidden = words.weight.shape
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ran = _ran(model, layout, tokens)
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
        cache=(*ran.cache, *[0] * (len(layout.blocks) - len(ran.cache))),
    )


def _saved_dtype(config: PreTrainedConfig, saved: Mapping[str, SavedTensor]) -> torch.dtype:
    """What ``dtype="auto"`` gives: the configuration's dtype, or else the checkpoint's."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    floats: Counter[str] = Counter()
    for tensor in saved.values():
        if tensor.dtype in FLOATS:
            floats[tensor.dtype] += tensor.nbytes
    return _TORCH[floats.most_common(1)[0][0]] if floats else torch.get_default_dtype()


def _saved_bytes(
    layout: Layout, saved: Mapping[str, SavedTensor], dtype: torch.dtype | None, built: Counter[int | str]
) -> Counter[int | str] | None:
    """Bytes by part, once loaded in a dtype (None: as saved); None where the checkpoint's names tell nothing.

    A checkpoint may have other names in front than the model (``h.0`` for ``transformer.h.0``), and lists of other
    blocks, such as a vision tower's.
    """
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    prefixes = {path: _prefix_in(saved, path) for path in lists}
    if not lists or None in prefixes.values():
        return None
    found: Counter[int | str] = Counter()
    for name, tensor in saved.items():
        part = layout.part_of(_renamed(name, prefixes))
        if part == "rest" and any(name.startswith(f"{prefix}.") for prefix in prefixes.values()):
            continue  # of a block beyond the last layer, which predicts a further token and is not loaded
        found[part] += tensor.nbytes if dtype is None else _loaded_bytes(tensor, dtype)
    if not all(found[index] for index in range(len(layout.blocks))):
        return None
    for part in ("embedding", "head"):
        if not found[part]:  # saved under another name
            found[part] = min(built[part], found["rest"])
            found["rest"] -= found[part]
    return found


def _prefix_in(saved: Mapping[str, SavedTensor], path: str) -> str | None:
    """The name that a list of blocks has in a checkpoint: of those that end alike, the one that weighs most."""
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
    """A tensor's name as the model has it, where it is of a block."""
    for path, prefix in prefixes.items():
        if prefix is not None and name.startswith(f"{prefix}."):
            return path + name[len(prefix) :]
    return name


def _loaded_bytes(tensor: SavedTensor, dtype: torch.dtype) -> int:
    return tensor.numel * dtype.itemsize if tensor.dtype in FLOATS else tensor.nbytes


def _built_bytes(model: PreTrainedModel, layout: Layout, config: PreTrainedConfig) -> Counter[int | str]:
    """Bytes by part of a model on the meta device, as its quantisation would have them."""
    found: Counter[int | str] = Counter()
    quantised = _quantised(model, config)
    for name, parameter in model.named_parameters():
        found[layout.part_of(name)] += quantised.get(name, parameter.nbytes)
    return found


def _quantised(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    """Bytes of the weights that a configuration says are quantised: those of linear layers and experts in blocks."""
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
    """Bits of one quantised weight, its share of the scales included; None: not quantised, or in an unknown way."""
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


def _ran(model: PreTrainedModel, layout: Layout, tokens: int) -> DryRun:
    """A dry run; of a model whose code asks for the contents of tensors, a guess."""
    widths = Counter[int | str]()
    for name, parameter in model.named_parameters():
        widths[layout.part_of(name)] += parameter.shape[-2] if parameter.ndim > 1 else 0
    widest = max((widths[index] for index in range(len(layout.blocks))), default=0)
    try:
        return dry_run(model, layout.blocks, tokens)
    except Exception:  # the model's own code, of any kind
        return _guessed(tokens, widest, len(layout.blocks), model.dtype)


def _guessed(tokens: int, width: int, layers: int, dtype: torch.dtype) -> DryRun:
    """As if a block kept all that its layers give, a ``width`` a token, four times in float32, and as much a cache."""
    every = tokens * width
    return DryRun(16 * every, 16 * every, (every * dtype.itemsize,) * layers)
