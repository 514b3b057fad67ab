"""Bytes of a model's weights, activations and KV cache before loading.

Weights are counted in the headers of the checkpoint; without a checkpoint, on the model that its configuration builds
on the meta device. Activations and KV cache come from passes on that device (`activations`, `kv_cache`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headscan.checkpoints.headers import read_headers
from headscan.checkpoints.sources import load_config
from headscan.loading import check_dtype, empty_model
from headscan.models.layout import Layout, find_layout
from headscan.models.model_class import is_encoder
from headscan.models.model_errors import MODEL_ERRORS, first_line, raise_if_out_of_memory
from headscan.models.positions import max_tokens
from headscan.sizing.activations import DryRun, dry_run
from headscan.sizing.kv_cache import fill_caches
from headscan.sizing.meta_pass import shorten
from headscan.sizing.weight_bytes import built_bytes, saved_bytes, saved_dtype

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
            plain pass, and of one that measures heads (see `activations.DryRun`).
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
        """Return the bytes of a batch's KV cache in some layers.

        They are ``first`` to ``last - 1``; None includes all above.
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

    Raises:
        ModelLoadError: There is no such model, or it is not a text model.
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
    """Return estimated sizes from the width of a block.

    A block keeps ``width`` numbers per token, four times in float32, and caches as many.
    """
    every = tokens * width
    return DryRun(16 * every, 16 * every), (every * dtype.itemsize,) * layers
