"""Masks, a fixed set of ablated heads, and random heads, the control of a rule, drawn for every sequence.

Shapes: B sequences, N tokens, L layers, H query heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from headscan.ablation.intervention import (
    ZERO,
    Ablation,
    InterventionRecord,
    LayerwiseAblation,
    OutputReplacer,
    Replacement,
    intervene,
)
from headscan.attention.hooks import output_hook
from headscan.catalog import head_count
from headscan.errors import InterventionError, check_type
from headscan.grid import AttentionSite, Head, Heads, heads_of_any
from headscan.models.loaded_model import LoadedModel
from headscan.options import Limits, Seed, check_limits, short

#: Heads that the text of a mask names.
_SHOWN_HEADS = 8


@dataclass(frozen=True)
class HeadMask(LayerwiseAblation):
    """A fixed set of ablated query heads.

    Attributes:
        heads: ``(layer, head)`` pairs, or the heads of each layer by its number, or a table of bools (L, H).
        replacement: What takes the place of their outputs: zero, `HeadMeans` or `HeadSamples`.

    Raises:
        HeadIndexError: A pair is not two integers.
        InterventionError: The replacement is of another type.
    """

    heads: tuple[Head, ...]
    replacement: Replacement
    label = "mask"

    def __init__(self, heads: Heads, replacement: Replacement = ZERO) -> None:
        check_type("replacement", replacement, Replacement, "a HeadMeans or HeadSamples", InterventionError)
        object.__setattr__(self, "replacement", replacement)
        object.__setattr__(self, "heads", heads_of_any(heads))

    def __repr__(self) -> str:
        listed = " ".join(f"{layer}:{head}" for layer, head in self.heads[:_SHOWN_HEADS])
        more = f" and {len(self.heads) - _SHOWN_HEADS} more" if len(self.heads) > _SHOWN_HEADS else ""
        return f"HeadMask({listed}{more}, replacement={self.replacement!r})"

    @classmethod
    def of_lowest(cls, values_LH: Tensor, share: float, replacement: Replacement = ZERO) -> HeadMask:
        """Return a mask of the heads with the lowest values.

        Args:
            values_LH: A number for each head (L, H), such as the mean of a score over sequences; their negative masks
                the highest. NaN marks heads that a layer lacks.
            share: Share of the heads with a number, above 0 and at most 1; at least one head is masked.
            replacement: What takes the place of the heads' outputs.

        Raises:
            InterventionError: ``values_LH`` does not have two axes, or no number, or ``share`` is out of range.
        """
        try:
            values = torch.as_tensor(values_LH).detach().cpu().double()
        except (TypeError, ValueError, RuntimeError):
            values = torch.empty(0)
        if values.ndim != 2 or values.isnan().all():
            raise InterventionError(
                f"`values_LH` of shape {tuple(values.shape)} is no table of numbers. Pass one number for each layer and"
                " head, such as `score(...).mean(0)`"
            )
        check_type("share", share, Real, "a number above 0, at most 1", InterventionError)
        if not 0 < share <= 1:
            raise InterventionError(f"`share={share:g}` (limit above 0, at most 1). Change `share`")
        count = head_count(share, int((~values.isnan()).sum()))
        # NaN sorts last, and ties go by layer and head.
        lowest = values.flatten().sort(stable=True).indices[:count]
        heads_of_layer = values.shape[1]
        return cls(((int(index) // heads_of_layer, int(index) % heads_of_layer) for index in lowest), replacement)

    @property
    def fixed_heads(self) -> tuple[Head, ...]:
        return self.heads

    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None = None) -> Tensor:
        ablated_H = torch.zeros(site.num_attention_heads, dtype=torch.bool)
        ablated_H[[head for layer, head in self.heads if layer == site.layer]] = True
        return ablated_H

    def within(self, first: int, last: int) -> HeadMask:
        return HeadMask((head for head in self.heads if first <= head.layer < last), self.replacement)

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        hook = _MaskHook(lm, self, record)
        with self.replacement.watching(lm), output_hook(lm, hook):
            yield


class _MaskHook:
    def __init__(self, lm: LoadedModel, mask: HeadMask, record: InterventionRecord) -> None:
        self.record = record
        layers = {layer for layer, _ in lm.grid.check(mask.heads)}
        mask.check_replacement(lm.grid)
        self._replacer = OutputReplacer(mask.replacement, record)
        self._ablated = {site.layer: mask.heads_at(site) for site in lm.grid.sites if site.layer in layers}
        self._ablated_on_device: dict[int, Tensor] = {}

    def __call__(self, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor | None:
        ablated_H = self._ablated.get(site.layer)
        if ablated_H is None:
            self.record.note(site, torch.zeros(len(outputs_BNHD), site.num_attention_heads, dtype=torch.bool))
            return None
        self.record.note(site, ablated_H.expand(len(outputs_BNHD), -1))
        if site.layer not in self._ablated_on_device:
            self._ablated_on_device[site.layer] = ablated_H.to(outputs_BNHD.device)
        return self._replacer(site, outputs_BNHD, self._ablated_on_device[site.layer])


@dataclass(frozen=True)
class SiteMask(Ablation):
    """Fixed sets of ablated query heads at several sites of a model, such as ``encoder`` and ``cross``; their outputs
    become zero. A record of it stays empty, because its shape is that of one site.

    Attributes:
        sites: Pairs of a site and its ``(layer, head)`` pairs, by name; sites without heads are left out.

    Raises:
        HeadIndexError: A pair is not two integers.
        InterventionError: ``sites`` name no heads by site.
    """

    sites: tuple[tuple[str, tuple[Head, ...]], ...]
    label = "mask of several sites"

    def __init__(self, sites: Mapping[str, Heads] | Iterable[tuple[str, Heads]]) -> None:
        try:
            named = dict(sites)
        except (TypeError, ValueError):
            named = {}
            check_type("sites", sites, Mapping, "heads by site, such as {'encoder': [(3, 5)]}", InterventionError)
        masks = ((site, heads_of_any(heads)) for site, heads in sorted(named.items()))
        object.__setattr__(self, "sites", tuple((site, heads) for site, heads in masks if heads))

    @property
    def fixed_heads(self) -> tuple[Head, ...]:
        """The heads of one site after the other."""
        return tuple(head for _, heads in self.sites for head in heads)

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        with ExitStack() as masks:
            for site, heads in self.sites:
                masks.enter_context(intervene(lm.at(site), HeadMask(heads)))
            yield


@short
@dataclass(frozen=True)
class RandomHeads(Ablation):
    """Ablates each head of each sequence with the same probability: the control of a rule.

    The heads depend on the seed and the sequence's key only, not on the batch. With one seed, the heads of a smaller
    share are a subset of those of a larger one.

    Attributes:
        share: The probability, 0 to 1.
        seed: Integer, at least 0.
        replacement: What takes the place of a head's output: zero, `HeadMeans` or `HeadSamples`.

    Raises:
        InterventionError: ``share`` or ``seed`` is out of range.
    """

    share: Annotated[float, Limits(least=0, most=1)]
    seed: Seed = 0
    replacement: Replacement = ZERO
    label = "random heads"

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)

    def draw(self, key: int, shape: tuple[int, int]) -> Tensor:
        """Return the ablated heads of the sequence with this key: bool (L, H)."""
        return torch.from_numpy(np.random.default_rng([self.seed, key]).random(shape) < self.share)

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        hook = _RandomHook(lm, self, record)
        with self.replacement.watching(lm), output_hook(lm, hook):
            yield


class _RandomHook:
    """Draws the heads of all layers of a sequence when its first layer runs."""

    def __init__(self, lm: LoadedModel, heads: RandomHeads, record: InterventionRecord) -> None:
        heads.check_replacement(lm.grid)
        self.shape, self.heads, self.record = lm.grid.shape, heads, record
        self._replacer = OutputReplacer(heads.replacement, record)
        self._keys: list[int] = []
        self._drawn_BLH = torch.empty(0, *self.shape)

    def __call__(self, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor:
        keys = self.record.keys_of(len(outputs_BNHD))
        if keys != self._keys:
            self._drawn_BLH = torch.stack([self.heads.draw(key, self.shape) for key in keys])
            self._keys = keys
        ablated_BH = self._drawn_BLH[:, site.layer, : site.num_attention_heads]
        self.record.note(site, ablated_BH)
        return self._replacer(site, outputs_BNHD, ablated_BH)
