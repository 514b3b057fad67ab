"""Stages: a model of which only a range of layers is loaded, and passes that go through that range.

    layers = headscan.partial.layer_ranges.open_layers("path-or-hub-name", device="cpu")
    with layers.at(0, 16) as stage, stage.running_range() as range_pass:
        low = headscan.collect(stage.lm, ids, lengths)
    with layers.at(16, 32) as stage, stage.running_range(range_pass.hidden_out):
        high = headscan.collect(stage.lm, ids, lengths)

What measures or ablates heads of a whole model does the same, unchanged, on the heads that a stage has.

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
from headscan.layers.blocks import Block
from headscan.layers.layer_range_pass import RangePass, running_range
from headscan.models.loaded_model import LoadedModel
from headscan.partial.inspection import Inspection, inspect_model
from headscan.partial.lazy_model import LazyModel, RawTensors


@dataclass(frozen=True)
class StageModel(LoadedModel):
    """Some layers of a model; its grid has their heads alone, but the shape of the whole model's.

    Attributes:
        first, last: The layers ``first`` to ``last - 1`` are here.
        is_last: The model ends with them: it gives logits.
    """

    first: int = 0
    last: int = 0
    is_last: bool = True


def gives_logits(lm: LoadedModel) -> bool:
    """Whether a pass ends in logits: of a whole model, and of the last range of layers."""
    return not isinstance(lm, StageModel) or lm.is_last


def ablation_here(lm: LoadedModel, ablation: Ablation) -> Ablation:
    """Return the part of an ablation that concerns the layers of this model."""
    if not isinstance(lm, StageModel):
        return ablation
    return ablation.within(lm.first, lm.last)


@dataclass(frozen=True)
class Stage:
    """A range of layers, ready to run.

    Attributes:
        lm: The model; passes through it belong inside `running_range`.
        blocks: All its blocks, those without weights included.
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
        """Whether the model ends with this range."""
        return self.lm.is_last

    def running_range(self, hidden: Tensor | None = None) -> AbstractContextManager[RangePass]:
        """Let passes go through these layers alone.

        A pass is called as one through the whole model is, with the same token ids and without a KV cache.

        Args:
            hidden: What enters the first layer (B, N, E), as the range before let it go; None for the range that begins
                with the model.

        Yields:
            The range_pass; its ``hidden`` is what left the last layer, after the pass; None where the model ends.

        Raises:
            InterventionError: In a pass: ``hidden`` lacks or is of another batch, or a KV cache is used.
        """
        return running_range(self.blocks, self.first, self.last, hidden)


class Layers:
    """A model whose layers are loaded range by range.

    Attributes:
        lazy_model: The model without its weights.
        inspect_model: What is known of it.
        tokenizer: Its tokenizer, or None where the source has none.

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
        """How many layers the model has."""
        return self.inspection.num_layers

    def size(self, first: int, last: int) -> int:
        """Bytes of the weights of a range of layers, and of the ends of the model that it reaches."""
        return self.lazy_model.size(self._names(first, last))

    @property
    def size_outside(self) -> int:
        """Bytes of the weights that are here all the time: norms and tables outside the layers."""
        return self.lazy_model.size(self._outside)

    @property
    def outline(self) -> LoadedModel:
        """The model with all its heads, for whoever asks what it is: it cannot run."""
        self._fill_embedding()
        lazy_model = self.lazy_model
        return LoadedModel(lazy_model.model, self.tokenizer, self.inspection.grid, lazy_model.source, lazy_model.commit)

    def read(self, first: int, last: int) -> RawTensors:
        """Read the weights of a range from the checkpoint, for `at`; another thread may do it while the model runs.

        Raises:
            ModelLoadError: A file cannot be read.
        """
        return self.lazy_model.read(self._names(first, last))

    def load(self, first: int, last: int, raw: RawTensors | None = None) -> Stage:
        """Load a range of layers.

        Args:
            first, last: The layers ``first`` to ``last - 1``.
            raw: What `read` gave for them, which is used up; None: they are read now.

        Raises:
            ModelLoadError: A file cannot be read.
            UnsupportedModelError: The model has no such layers, or cannot be cut there.
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
        """Let go of a stage's weights."""
        self.lazy_model.drop(self._names(stage.first, stage.last))

    @contextmanager
    def at(self, first: int, last: int, raw: RawTensors | None = None) -> Iterator[Stage]:
        """`load`, for the time being."""
        stage = self.load(first, last, raw)
        try:
            yield stage
        finally:
            self.drop(stage)

    def _fill_embedding(self) -> None:
        """Where the word embedding is not here, let it give zeros, which are replaced where a range begins."""
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
    """Open a model whose layers are to be loaded range by range.

    Args:
        source, dtype, revision, trust_remote_code, safetensors: As for `headscan.load`.
        device: Where the layers run: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto``: on a GPU where there is one.
        inspection: The result of `inspect_model` for this model; None inspects it now, with random weights, which takes
            the memory of its two ends and one layer.

    Raises:
        ModelLoadError: As for `headscan.load`, or the weights are pickled or quantised.
        UnsupportedModelError: Its heads cannot be measured rightly, or it is no decoder that can be taken apart.
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
