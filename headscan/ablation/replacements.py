"""What takes the place of an ablated head's output.

"Inactive" (nothing is lost at zero) and "constant" (nothing is lost at the mean) are different findings, so every
ablation names the value that it tests.

Shapes: B sequences, N tokens, H query heads, D width of a head's output.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscan.catalog import Value
from headscan.errors import InterventionError
from headscan.grid import AttentionSite, HeadGrid

if TYPE_CHECKING:
    from headscan.ablation.record import InterventionRecord
    from headscan.models.loaded_model import LoadedModel


class Replacement(ABC):
    """The output of ablated heads; immutable, hashable and picklable."""

    @property
    @abstractmethod
    def value(self) -> Value:
        """Name of the value, for verdicts."""

    @property
    def position_free(self) -> bool:
        """True if the output depends neither on the sequence nor on the position of a token."""
        return True

    @abstractmethod
    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        """Raise if heads of these layers cannot be replaced."""

    def watching(self, lm: LoadedModel) -> AbstractContextManager[object]:
        """Return a context in which passes that the replacement cannot serve raise an error."""
        return nullcontext()

    def stored(self, layer: int) -> Tensor | None:
        """Return the outputs of a layer, on the CPU; None replaces by zero."""
        return None

    def outputs(self, stored: Tensor, heads_BNHD: Tensor, keys: Sequence[int]) -> Tensor:
        """Return outputs that broadcast to (B, N, H, D).

        Args:
            stored: As from `stored`, on the device and in the dtype of the heads.
            heads_BNHD: The heads' own outputs.
            keys: The key of each sequence; empty if `position_free`.
        """
        return stored


@dataclass(frozen=True)
class ZeroOutput(Replacement):
    """Zero (arXiv 2504.03889, 1905.10650)."""

    @property
    def value(self) -> Value:
        return "zero"

    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        """Zero fits every model."""


ZERO = ZeroOutput()


@dataclass(frozen=True, eq=False)
class StoredOutputs(Replacement):
    """Outputs of heads that were collected before.

    Attributes:
        by_layer: Outputs by layer, on the CPU; the last two axes are heads and width.
        kind: Kind of site: ``self``, ``encoder`` or ``cross``.
        digest: Hash of the contents; equal digests mean equal replacements.
    """

    by_layer: Mapping[int, Tensor] = field(repr=False)
    kind: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        own = {layer: self.by_layer[layer].detach().cpu().clone() for layer in sorted(self.by_layer)}
        object.__setattr__(self, "by_layer", own)
        found = hashlib.sha256(repr((type(self).__name__, self._settings())).encode())
        for layer, outputs in own.items():
            found.update(f"{layer} {tuple(outputs.shape)} {outputs.dtype}".encode())
            found.update(outputs.contiguous().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", found.hexdigest()[:16])

    def _settings(self) -> tuple[object, ...]:
        """Return all further fields that decide outputs."""
        return (self.kind,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredOutputs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def check(self, grid: HeadGrid, layers: Sequence[int]) -> None:
        if self.kind != grid.kind:
            raise InterventionError(
                f"{self.value} outputs of site {self.kind!r} replace heads of site {grid.kind!r}. Collect those of the "
                "same site"
            )
        for layer in layers:
            site = grid.site_of(layer)
            shape = (site.num_attention_heads, site.value_dim)
            if layer not in self.by_layer:
                raise InterventionError(
                    f"no {self.value} outputs of layer {layer}: they were not collected. Collect them on a corpus"
                )
            if (found := tuple(self.by_layer[layer].shape[-2:])) != shape:
                raise InterventionError(
                    f"{self.value} outputs of layer {layer} have shape {found} (limit {shape}). Collect those of this "
                    "model"
                )

    def stored(self, layer: int) -> Tensor:
        return self.by_layer[layer]


@dataclass(frozen=True, eq=False)
class HeadMeans(StoredOutputs):
    """The mean output of each head over the tokens of a corpus, from `collect_outputs.head_means`.

    ``by_layer`` holds (H, D) each.
    """

    @property
    def value(self) -> Value:
        return "mean"


class Filler:
    """Replaces outputs of ablated heads in forward passes.

    Args:
        replacement: What replaces them.
        record: Source of the sequences' keys.
    """

    def __init__(self, replacement: Replacement, record: InterventionRecord) -> None:
        self._replacement, self._record = replacement, record
        self._here: dict[tuple[int, torch.device, torch.dtype], Tensor | None] = {}

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor, ablated: Tensor) -> Tensor:
        """Return the outputs (B, N, H, D) with ablated heads replaced.

        Args:
            ablated: bool (H,) or (B, H), on any device.
        """
        ablated = ablated.to(heads_BNHD.device)
        where = ablated[:, None] if ablated.ndim == 1 else ablated[:, None, :, None]
        stored = self._stored(site, heads_BNHD)
        if stored is None:
            return heads_BNHD.masked_fill(where, 0.0)
        keys = () if self._replacement.position_free else self._record.keys_of(len(heads_BNHD))
        return torch.where(where, self._replacement.outputs(stored, heads_BNHD, keys), heads_BNHD)

    def _stored(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor | None:
        """Return the stored outputs of a layer; copied once to each device."""
        key = (site.layer, heads_BNHD.device, heads_BNHD.dtype)
        if key not in self._here:
            stored = self._replacement.stored(site.layer)
            self._here[key] = None if stored is None else stored.to(heads_BNHD.device, heads_BNHD.dtype)
        return self._here[key]
