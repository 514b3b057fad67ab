"""What a model weighs, part by part, and what it keeps in memory while it runs: known before a weight is loaded.

Weights are counted in the headers of the checkpoint, or, where there is a configuration alone, on the model that is
built from it on the meta device. What a pass takes beside them is seen in a pass on that device (`activations`).
"""

from __future__ import annotations

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
from headscan.models.positions import max_tokens
from headscan.sizing.activations import DryRun, dry_run
from headscan.sizing.kv_cache import fill_caches
from headscan.sizing.meta_pass import shorten
from headscan.sizing.weight_bytes import built_bytes, saved_bytes, saved_dtype

#: Tokens of the sequence that activations are worked out for, unless told otherwise.
_TOKENS = 2048
#: Activations in percent of what tensors alone take: allocators and kernels need something of their own.
_WITH_MARGIN = 110


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
            it keeps while heads are measured (see `activations.DryRun`).
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

    def activation_bytes(self, tokens: int, *, measured: bool) -> int:
        """What a batch of sequences of `tokens` tokens takes beside the weights.

        Args:
            tokens: Of the whole batch.
            measured: Heads are measured, also, by a rule.
        """
        sequence = self.measured if measured else self.plain
        return -(-sequence * tokens * _WITH_MARGIN // (100 * self.tokens))

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
    """A dry run and the bytes of each block's KV cache; of a model whose code reads the contents of tensors, a guess.

    Of an encoder-decoder the cache is left out: no job keeps it between passes.
    """
    widths = Counter[int | str]()
    for name, parameter in model.named_parameters():
        widths[layout.part_of(name)] += parameter.shape[-2] if parameter.ndim > 1 else 0
    layers = len(layout.blocks)
    widest = max((widths[index] for index in range(layers)), default=0)
    cache: tuple[int, ...] | None = None
    try:
        alike = shorten(model, layout.blocks)
        caches = () if model.config.is_encoder_decoder else fill_caches(model, alike).get("self", ())
        cache = tuple(each.bytes(tokens) for each in caches[:layers]) or (0,) * layers
        return dry_run(model, tokens), cache
    except Exception:  # the model's own code, of any kind
        ran, guessed = _guessed(tokens, widest, layers, model.dtype)
        return ran, guessed if cache is None else cache


def _guessed(tokens: int, width: int, layers: int, dtype: torch.dtype) -> tuple[DryRun, tuple[int, ...]]:
    """As if a block kept all that its layers give, a ``width`` a token, four times in float32, and as much a cache."""
    every = tokens * width
    return DryRun(16 * every, 16 * every), (every * dtype.itemsize,) * layers
