"""Stages: models that load one range of layers at a time.

    layers = headscan.partial.layer_ranges.open_layers("path-or-hub-name", device="cpu")
    with layers.at(0, 16) as stage, stage.running_range() as range_pass:
        low = headscan.collect(stage.lm, ids, lengths)
    with layers.at(16, 32) as stage, stage.running_range(range_pass.hidden_out):
        high = headscan.collect(stage.lm, ids, lengths)

All measurements and ablations work unchanged on the heads of a stage.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headscan.ablation.ablation import Ablation
from headscan.checkpoints.sources import load_tokenizer
from headscan.layers.layer_range_pass import RangePass, running_range
from headscan.models.decoder_block import Block
from headscan.models.loaded_model import LoadedModel
from headscan.partial.inspection import Inspection, inspect_model
from headscan.partial.lazy_model import LazyModel, RawTensors


@dataclass(frozen=True)
class StageModel(LoadedModel):
    """A range of a model's layers, with their heads.

    Its grid has the shape of the whole model.

    Attributes:
        first, last: The layers ``first`` to ``last - 1`` are loaded.
        is_last: The range ends with the model, so passes return logits.
    """

    first: int = 0
    last: int = 0
    is_last: bool = True


def gives_logits(lm: LoadedModel) -> bool:
    """Return True if passes return logits.

    They do for a whole model, and for the last range of layers.
    """
    return not isinstance(lm, StageModel) or lm.is_last


def ablation_here(lm: LoadedModel, ablation: Ablation) -> Ablation:
    """Return the part of an ablation in this model's layers."""
    if not isinstance(lm, StageModel):
        return ablation
    return ablation.within(lm.first, lm.last)


@dataclass(frozen=True)
class Stage:
    """A range of layers, ready to run.

    Attributes:
        lm: The model; run its passes inside `running_range`.
        blocks: All its blocks, including those without weights.
    """

    lm: StageModel
    blocks: tuple[Block, ...]

    @property
    def first(self) -> int:
        """The first layer."""
        return self.lm.first

    @property
    def last(self) -> int:
        """The layer after the last one."""
        return self.lm.last

    @property
    def is_last(self) -> bool:
        """True if the range ends with the model."""
        return self.lm.is_last

    def running_range(self, hidden: Tensor | None = None) -> AbstractContextManager[RangePass]:
        """Restrict passes to these layers.

        Call the model as for a whole pass, with the same token ids and without a KV cache.

        Args:
            hidden: Input of the first layer (B, N, E), the output of the range below; None for the first range.

        Yields:
            The pass; its ``hidden_out`` is the output of the last layer, or None at the end of the model.

        Raises:
            InterventionError: In a pass: ``hidden`` is missing or belongs to another batch, or a KV cache is used.
        """
        return running_range(self.blocks, self.first, self.last, hidden)


class Layers:
    """A model that loads its layers range by range.

    Attributes:
        lazy_model: The model, whose weights are loaded and dropped.
        inspection: Its heads, blocks and possible cuts.
        tokenizer: Its tokenizer; None if the source has none.

    Raises:
        ModelLoadError: As for `headscan.load`.
    """

    def __init__(
        self, lazy_model: LazyModel, inspection: Inspection, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.lazy_model, self.inspection, self.tokenizer = lazy_model, inspection, tokenizer
        self._blocks = inspection.blocks_of(lazy_model.model)
        outside = [name for name in lazy_model.names if inspection.outside.intersection(lazy_model.aliases(name))]
        lazy_model.put(outside, lazy_model.read(outside))
        self._outside = frozenset(outside)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.inspection.num_layers

    def size(self, first: int, last: int) -> int:
        """Return the bytes of a range, including the model's ends in it."""
        return self.lazy_model.size(self._names(first, last))

    @property
    def size_outside(self) -> int:
        """Bytes of the weights that stay loaded.

        They are norms and tables outside the layers.
        """
        return self.lazy_model.size(self._outside)

    @property
    def outline(self) -> LoadedModel:
        """The model with the grid of all heads, which cannot run."""
        self._fill_embedding()
        lazy_model = self.lazy_model
        return LoadedModel(lazy_model.model, self.tokenizer, self.inspection.grid, lazy_model.source, lazy_model.commit)

    def read(self, first: int, last: int) -> RawTensors:
        """Read a range's weights for `load`, possibly in another thread.

        Raises:
            ModelLoadError: A file cannot be read.
        """
        return self.lazy_model.read(self._names(first, last))

    def load(self, first: int, last: int, raw: RawTensors | None = None) -> Stage:
        """Load a range of layers.

        Args:
            first, last: The layers ``first`` to ``last - 1``.
            raw: The result of `read` for them, which is consumed; None reads them now.

        Raises:
            ModelLoadError: A file cannot be read.
            UnsupportedModelError: There are no such layers, or the model cannot be cut there.
        """
        self.inspection.check([first, last])
        names = self._names(first, last)
        self.lazy_model.put(names, self.lazy_model.read(names) if raw is None else raw)
        self._fill_embedding()
        is_last = last == self.num_layers
        grid = self.inspection.grid
        grid = replace(
            grid, sites=tuple(site for site in grid.sites if first <= site.layer < last), model_max_heads=grid.max_heads
        )
        source, commit = self.lazy_model.source, self.lazy_model.commit
        lm = StageModel(self.lazy_model.model, self.tokenizer, grid, source, commit, first, last, is_last)
        return Stage(lm, self._blocks)

    def drop(self, stage: Stage) -> None:
        """Drop the weights of a stage."""
        self.lazy_model.drop(self._names(stage.first, stage.last))

    @contextmanager
    def at(self, first: int, last: int, raw: RawTensors | None = None) -> Iterator[Stage]:
        """Load a range of layers, and drop it on exit."""
        stage = self.load(first, last, raw)
        try:
            yield stage
        finally:
            self.drop(stage)

    def _fill_embedding(self) -> None:
        """Replace a missing word embedding by zeros.

        The input of the range's first layer replaces its output.
        """
        for name in self.inspection.embedding:
            if self.lazy_model.tensor(name).is_meta:
                self.lazy_model.blank(name)

    def _names(self, first: int, last: int) -> tuple[str, ...]:
        return tuple(
            name for name in self.inspection.weights(self.lazy_model, first, last) if name not in self._outside
        )


def open_layers(
    source: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    safetensors: bool = True,
    inspection: Inspection | None = None,
) -> Layers:
    """Open a model to load its layers range by range.

    Args:
        source, dtype, revision, trust_remote_code, safetensors: As for `headscan.load`.
        device: Device of the layers: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto`` prefers a GPU.
        inspection: The result of `inspect_model` for this model; None inspects it now, which takes the memory of
            its two ends and one layer.

    Raises:
        ModelLoadError: As for `headscan.load`, or the weights are pickled or quantised.
        UnsupportedModelError: Its heads cannot be measured correctly, or it is not a decoder with a list of blocks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    lazy_model = LazyModel(
        source,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        safetensors=safetensors,
    )
    tokenizer = load_tokenizer(lazy_model.source, revision, trust_remote_code)
    return Layers(lazy_model, inspect_model(lazy_model) if inspection is None else inspection, tokenizer)
