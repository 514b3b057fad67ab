"""Running a model with an intervention: records of ablated heads, replacements of outputs, and the base classes.

The whole output of an ablated head is replaced, for all tokens, before the output projection: by zero unless the
ablation names another value. Nothing is renormalised (arXiv 2504.03889, 1905.10650). "Inactive" (nothing is lost at
zero) and "constant" (nothing is lost at the mean) are different findings, so every ablation names the value that it
tests. Another intervention is a subclass of `Intervention` (`KvWindows` in ``headscan.kv``), of `Ablation` if it
replaces outputs (`SiteMask` in ``masks.py``), or of `ScoredAblation` if the scores of a layer decide (`HeadRule` in
``rules.py``).

Shapes: B sequences, N tokens, L layers, H query heads, D width of a head's output.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headscan.catalog import MassWidths, ReplacementKind
from headscan.errors import InterventionError, check_type
from headscan.grid import AttentionSite, Head, HeadGrid
from headscan.models.loaded_model import LoadedModel, check_loaded
from headscan.models.token_batches import integers
from headscan.text_tables import counted, percent


class InterventionRecord:
    """Heads that an intervention ablated, and the lengths and input keys of the next batch.

    Attributes:
        lengths: Real tokens (B,) of the next forward pass. A rule reads them; set them again when the batch changes.
            None takes them from the padding mask of the pass; without a mask all tokens are real.
        input_keys: Integers (B,) of 0 or more that seed random heads and samples of each sequence of the next forward
            pass; a sequence keeps its key in every batch. Set them again when the batch changes. None uses the row
            numbers.
    """

    def __init__(
        self, lm: LoadedModel, lengths: Tensor | Sequence[int] | None, input_keys: Tensor | Sequence[int] | None = None
    ) -> None:
        self.lengths = None if lengths is None else integers("lengths", lengths)
        self.input_keys: Tensor | Sequence[int] | None = (
            None if input_keys is None else integers("input_keys", input_keys)
        )
        self._shape = lm.grid.shape
        self._ablated: dict[int, Tensor] = {}
        self._sequences = 0
        self._total_heads = lm.grid.total_heads

    def __repr__(self) -> str:
        if not self._ablated:
            return "InterventionRecord(before the first pass)"
        share = self.ablated_shares.mean().item()
        return f"InterventionRecord({counted(self._sequences, 'sequence')}, {percent(share)} of heads ablated)"

    @property
    def ablated(self) -> Tensor | None:
        """Heads ablated in the last pass: bool (B, L, H), False where a layer lacks one; None before the first pass."""
        if not self._ablated:
            return None
        ablated_BLH = torch.zeros(self._sequences, *self._shape, dtype=torch.bool)
        for layer, ablated_BH in self._ablated.items():
            ablated_BLH[:, layer, : ablated_BH.shape[1]] = ablated_BH.cpu()
        return ablated_BLH

    @property
    def zeroed(self) -> Tensor | None:
        """Another name of `ablated`: bool (B, L, H)."""
        return self.ablated

    @property
    def ablated_shares(self) -> Tensor:
        """Share of heads ablated in each sequence of the last forward pass, 0 to 1: (B,).

        Raises:
            InterventionError: No forward pass has run.
        """
        if (ablated_BLH := self.ablated) is None:
            raise InterventionError("no forward pass has run yet. Run the model inside the context first")
        return ablated_BLH.sum((1, 2)).double() / self._total_heads

    @property
    def ablated_share(self) -> float:
        """Share of (sequence, head) pairs ablated in the last forward pass, 0 to 1."""
        return float(self.ablated_shares.mean())

    def keys_of(self, sequences: int) -> list[int]:
        """Return the keys of a batch; raise if `input_keys` do not fit it."""
        if self.input_keys is None:
            return list(range(sequences))
        input_keys = self.input_keys
        keys = input_keys.tolist() if isinstance(input_keys, Tensor) else [int(key) for key in input_keys]
        if len(keys) != sequences or min(keys) < 0:
            raise InterventionError(
                f"keys {keys[:8]} do not fit a batch of {sequences} sequences. Set `input_keys` (or "
                "record.input_keys) to one integer of 0 or more per sequence"
            )
        return keys

    def note(self, site: AttentionSite, ablated_BH: Tensor) -> None:
        """Record the ablated heads of one layer, on their device: a copy from the GPU would block every layer."""
        # A pass may start above the first layer, but never returns to a lower one.
        if self._ablated and (site.layer <= max(self._ablated) or len(ablated_BH) != self._sequences):
            self._ablated = {}
        self._sequences = len(ablated_BH)
        self._ablated[site.layer] = ablated_BH


class Replacement(ABC):
    """The output of ablated heads; immutable, hashable and picklable."""

    #: Name of the value, for verdicts.
    kind: ClassVar[ReplacementKind]
    #: True if the output depends neither on the sequence nor on the position of a token.
    position_free: ClassVar[bool] = True

    @abstractmethod
    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        """Raise if heads of these layers cannot be replaced."""

    def watching(self, lm: LoadedModel) -> AbstractContextManager[object]:
        """Return a context in which passes that the replacement cannot serve raise an error."""
        return nullcontext()

    def stored(self, layer: int) -> Tensor | None:
        """Return the outputs of a layer, on the CPU; None replaces by zero."""
        return None

    def outputs(self, stored: Tensor, outputs_BNHD: Tensor, keys: Sequence[int]) -> Tensor:
        """Return outputs that broadcast to (B, N, H, D), from those `stored` and, unless `position_free`, by keys."""
        return stored


@dataclass(frozen=True)
class ZeroOutput(Replacement):
    """Zero (arXiv 2504.03889, 1905.10650)."""

    kind = "zero"

    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        """Zero fits every model."""


ZERO = ZeroOutput()


@dataclass(frozen=True, eq=False)
class StoredOutputs(Replacement):
    """Outputs of heads (..., H, D) by layer, on the CPU, collected before; equal digests mean equal outputs."""

    by_layer: Mapping[int, Tensor] = field(repr=False)
    site: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        by_layer = {layer: self.by_layer[layer].detach().cpu().clone() for layer in sorted(self.by_layer)}
        object.__setattr__(self, "by_layer", by_layer)
        digest = hashlib.sha256(repr((type(self).__name__, self._settings())).encode())
        for layer, outputs in by_layer.items():
            digest.update(f"{layer} {tuple(outputs.shape)} {outputs.dtype}".encode())
            digest.update(outputs.contiguous().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", digest.hexdigest()[:16])

    def _settings(self) -> tuple[object, ...]:
        """Return all further fields that decide outputs."""
        return (self.site,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredOutputs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        if self.site != grid.kind:
            raise InterventionError(
                f"{self.kind} outputs of site {self.site!r} replace heads of site {grid.kind!r}. Collect those of the "
                "same site"
            )
        for layer in layers:
            site = grid.site_of(layer)
            layer_shape = (site.num_attention_heads, site.value_dim)
            if layer not in self.by_layer:
                raise InterventionError(
                    f"no {self.kind} outputs of layer {layer}: they were not collected. Collect them on a corpus"
                )
            if (shape := tuple(self.by_layer[layer].shape[-2:])) != layer_shape:
                raise InterventionError(
                    f"{self.kind} outputs of layer {layer} have shape {shape} (limit {layer_shape}). Collect those of "
                    "this model"
                )

    def stored(self, layer: int) -> Tensor:
        return self.by_layer[layer]


@dataclass(frozen=True, eq=False)
class HeadMeans(StoredOutputs):
    """The mean output (H, D) of each head over the tokens of a corpus, by layer; from `head_means`."""

    kind = "mean"


class OutputReplacer:
    """Replaces outputs of ablated heads in forward passes; the record has the keys of the sequences."""

    def __init__(self, replacement: Replacement, record: InterventionRecord) -> None:
        self._replacement, self._record = replacement, record
        self._on_device: dict[tuple[int, torch.device, torch.dtype], Tensor | None] = {}

    def __call__(self, site: AttentionSite, outputs_BNHD: Tensor, ablated: Tensor) -> Tensor:
        """Return the outputs (B, N, H, D) with those of ``ablated`` heads, bool (H,) or (B, H), replaced."""
        ablated = ablated.to(outputs_BNHD.device)
        where = ablated[:, None] if ablated.ndim == 1 else ablated[:, None, :, None]
        stored = self._stored(site, outputs_BNHD)
        if stored is None:
            return outputs_BNHD.masked_fill(where, 0.0)
        keys = () if self._replacement.position_free else self._record.keys_of(len(outputs_BNHD))
        return torch.where(where, self._replacement.outputs(stored, outputs_BNHD, keys), outputs_BNHD)

    def _stored(self, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor | None:
        """Return the stored outputs of a layer; copied once to each device."""
        key = (site.layer, outputs_BNHD.device, outputs_BNHD.dtype)
        if key not in self._on_device:
            stored = self._replacement.stored(site.layer)
            self._on_device[key] = None if stored is None else stored.to(outputs_BNHD.device, outputs_BNHD.dtype)
        return self._on_device[key]


class Intervention(ABC):
    """A change of attention while a model runs, such as an ablation of heads or a window on their keys; immutable,
    hashable and picklable.
    """

    #: True if the choice of heads needs the whole input in one pass. Such an intervention runs in the kernels of rules,
    #: without a KV cache.
    needs_whole_input: ClassVar[bool] = False
    #: True if continuations are read from a KV cache that has lost keys, see `new_cache`.
    evicts: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for messages."""

    @property
    def id(self) -> dict[str, object]:
        """Plain data, as in JSON, that identifies the change in a store. By default it has the class and the compared
        fields of a dataclass, but no replacement, which an arm describes by the texts behind it.

        Raises:
            InterventionError: The class is no dataclass, or a field holds no plain data. Such a class defines `id`.
        """
        return {"class": type(self).__name__, **_plain_fields(self)}

    @abstractmethod
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        """Return a context in which the model runs with this change; its passes read and update the record."""

    @property
    def fixed_heads(self) -> tuple[Head, ...] | None:
        """Ablated heads, if they are the same for every input; otherwise None."""
        return None

    @property
    def fixed(self) -> bool:
        """True if the change is the same for every input, as windows are, which have no `fixed_heads`."""
        return self.fixed_heads is not None

    @property
    def first_layer(self) -> int | None:
        """The lowest layer that changes; None if there is none, or if it depends on the input."""
        return min((head.layer for head in self.fixed_heads or ()), default=None)

    def first_difference(self, other: Intervention | None) -> int | None:
        """Return the lowest layer in which a pass differs from one under ``other``, which must not be equal (None is
        the whole model); None if it depends on the input.
        """
        return self.first_layer if other is None else 0

    @property
    def uses_headscan_kernels(self) -> bool:
        """True if headscan's kernels, which round differently from the model's own, compute the attention of this
        intervention, or of the one that it is a control of.
        """
        return not self.fixed

    def new_cache(self, lm: LoadedModel, *, context: bool = True) -> Cache:
        """Return an empty KV cache that evicts keys, after a first pass over a context or from the first token on."""
        raise InterventionError(f"{self.label} does not evict keys. Use the model's own KV cache")

    @property
    def may_share_prefix(self) -> bool:
        """True if inputs with a common prefix may continue from one KV cache of it."""
        return self.fixed

    def within(self, first: int, last: int) -> Intervention:
        """Return the part that concerns the layers ``first`` to ``last - 1``."""
        return self


def _plain_fields(value: Any) -> dict[str, object]:
    if not is_dataclass(value):
        raise InterventionError(f"{type(value).__name__} is no dataclass, so nothing identifies it. Define its `id`")
    named = {each.name: getattr(value, each.name) for each in fields(value) if each.compare}
    return {name: _plain(part) for name, part in named.items() if not isinstance(part, Replacement)}


def _plain(value: object) -> object:
    """Return numbers, texts, lists and dicts that JSON can hold."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    if isinstance(value, Set):
        return sorted((_plain(part) for part in value), key=str)
    return _plain_fields(value)


class Ablation(Intervention):
    """An intervention that replaces the output of heads."""

    replacement: Replacement = ZERO

    @property
    def kind(self) -> ReplacementKind:
        """Name of the tested value: zero tests whether heads are inactive, mean whether they are constant."""
        return self.replacement.kind

    @property
    def may_share_prefix(self) -> bool:
        return self.fixed and self.replacement.position_free

    def check_replacement(self, grid: HeadGrid) -> None:
        """Raise if the values do not fit the heads that may be ablated."""
        heads = self.fixed_heads
        layers = {site.layer for site in grid.sites} if heads is None else {head.layer for head in heads}
        self.replacement.check(grid, sorted(layers))


class LayerwiseAblation(Ablation):
    """An ablation whose heads follow from the scores of one layer, or are fixed. Inputs with a common prefix can run in
    one row, which ``headscan.layers.shared_rows`` ablates layer by layer.
    """

    @property
    def may_share_rows(self) -> bool:
        """True if inputs with a common prefix may share one row."""
        return self.replacement.position_free

    @property
    def scored_by(self) -> tuple[str, MassWidths] | None:
        """The score that decides which heads are ablated, with the widths of its masses; None if they are fixed."""
        return None

    @property
    def score_threshold(self) -> float | None:
        """The threshold of the score that decides which heads are ablated; None if they are fixed."""
        return None

    @abstractmethod
    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None) -> Tensor:
        """Return which heads are ablated in one layer, bool (H,) or (B, H), by the scores of `scored_by`, if any."""


@contextmanager
def intervene(
    lm: LoadedModel,
    intervention: Intervention,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    input_keys: Tensor | Sequence[int] | None = None,
) -> Iterator[InterventionRecord]:
    """Ablate heads, or limit their keys, while the context is open; contexts nest, also inside and around `collect`.

    Args:
        lm: A model from `headscan.load`.
        intervention: A `HeadMask`, `SiteMask`, `HeadRule`, `RandomHeads`, `KvWindows`, or one of your own.
        lengths: Real tokens (B,) of each sequence of the next batch, read by rules only. None takes them from the
            padding mask of the pass, or from `collect` if that runs it; without either all tokens are real.
        input_keys: Integers (B,) of 0 or more that seed random heads and samples of each sequence; None uses the row
            numbers.

    Raises:
        HeadIndexError: The mask contains a head that the model lacks.
        InterventionError: A rule is applied to cross attention; in a pass: lengths or keys do not fit the batch, or a
            rule's padding mask contradicts the lengths or is not padded on the right.
        SequenceError: In a pass with a rule: sequences of the batch need different rotary frequencies.
        UnsupportedModelError: The model is compiled or in train mode.
    """
    check_loaded(lm)
    kinds = "a HeadMask, SiteMask, HeadRule, RandomHeads or KvWindows"
    check_type("intervention", intervention, Intervention, kinds, InterventionError)
    record = InterventionRecord(lm, lengths, input_keys)
    with intervention.hooks(lm, record):
        yield record
