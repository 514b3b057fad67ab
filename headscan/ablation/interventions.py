"""Ablating heads: a fixed set of them, by a rule that looks at each input as it runs, or at random.

A ablated head's whole output is zero, for all tokens, before the output projection; nothing is renormalised
(arXiv 2504.03889, 1905.10650).

Shapes: B sequences, N tokens, L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscan.ablation.padding import PaddingWatch, agreed_lengths, lengths_in_mask, mask_argument
from headscan.ablation.record import InterventionRecord
from headscan.ablation.rule_statistics import RuleStatistics
from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook, output_hook
from headscan.errors import InterventionError
from headscan.grid import AttentionSite, Head
from headscan.measure.scores import find_score, score
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class HeadMask:
    """A fixed set of ablated query heads.

    Attributes:
        heads: ``(layer, head)`` pairs.
    """

    heads: tuple[Head, ...]

    def __init__(self, heads: Iterable[tuple[int, int]]) -> None:
        object.__setattr__(self, "heads", tuple(sorted({Head(int(layer), int(head)) for layer, head in heads})))


@dataclass(frozen=True)
class HeadRule:
    """Ablates, in every input, the heads whose score for that input lies beyond a threshold.

    Each layer scores its heads on activations that the rule has already changed below it, as in the paper.

    Attributes:
        score: Name of a score; the catalogue says which end is inactive.
        threshold: A head is ablated when its score is strictly beyond it: below, or above where high is inactive.

    Raises:
        UnknownNameError: The catalogue lacks the score.
        InterventionError: The threshold is not a number.
    """

    score: str
    threshold: float

    def __post_init__(self) -> None:
        find_score(self.score)
        if not self.threshold == self.threshold:
            raise InterventionError(f"the threshold of {self.score} is NaN: give a number")

    def ablates(self, scores: Tensor) -> Tensor:
        """Which heads the rule ablates: bool, shaped like ``scores``."""
        high = find_score(self.score).inactive == "high"
        return scores > self.threshold if high else scores < self.threshold


@dataclass(frozen=True)
class RandomHeads:
    """Ablates each head of each sequence with the same probability: the control a rule is held against.

    What is ablated in a sequence follows from the seed and the sequence's key alone, wherever and with whatever else
    it runs, and of two shares the smaller one's heads are among the larger one's.

    Attributes:
        share: The probability, 0 to 1.
        seed: Whole number, not negative.

    Raises:
        InterventionError: One of them is out of range.
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InterventionError(f"a share of {self.share} random heads: give a number from 0 to 1")
        if self.seed < 0:
            raise InterventionError(f"seed {self.seed} of random heads is negative: give 0 or more")

    def draw(self, key: int, shape: tuple[int, int]) -> Tensor:
        """What is ablated in the sequence of this key: bool (L, H)."""
        return torch.from_numpy(np.random.default_rng([self.seed, key]).random(shape) < self.share)


@contextmanager
def intervene(
    lm: LoadedModel,
    what: HeadMask | HeadRule | RandomHeads,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    keys: Tensor | Sequence[int] | None = None,
) -> Iterator[InterventionRecord]:
    """Ablate heads for as long as the context is open; contexts can be nested, inside and around `collect` too.

    Args:
        lm: A model from `headscan.load`.
        what: A mask, a rule or random heads.
        lengths: Real tokens of each sequence (B,) of the batch to come. Only a rule needs them. None takes them from
            the padding mask of the pass, or from `collect` where that runs it; without either all tokens are real.
        keys: By what random heads are drawn for each sequence (B,); None: its row number.

    Raises:
        HeadIndexError: The mask names a head that the model lacks.
        InterventionError: A rule is to look at cross attention; in a pass: lengths or keys do not fit the batch, or a
            rule meets a padding mask that contradicts the lengths or is not padded on the right.
        SequenceError: In a pass with a rule: sequences of the batch need different rotary frequencies.
        UnsupportedModelError: The model is compiled or in train mode.
    """
    record = InterventionRecord(lm, lengths, keys)
    with ExitStack() as hooks:
        if isinstance(what, HeadMask):
            hooks.enter_context(output_hook(lm, _MaskVisitor(lm, what, record)))
        elif isinstance(what, RandomHeads):
            hooks.enter_context(output_hook(lm, _RandomVisitor(lm, what, record)))
        else:
            visitor = _RuleVisitor(lm, what, record)
            hooks.enter_context(visitor.padding.watching())
            # Also for a rule that needs no weights: this hook tells whole inputs from the steps of a KV cache.
            hooks.enter_context(attention_hook(lm, visitor.attended))
            hooks.enter_context(output_hook(lm, visitor.visited))
        yield record


class _MaskVisitor:
    def __init__(self, lm: LoadedModel, mask: HeadMask, record: InterventionRecord) -> None:
        self.record = record
        self.ablated: dict[int, Tensor] = {}
        self._here: dict[int, Tensor] = {}  # the same, where each layer runs
        for layer, head in lm.grid.check(mask.heads):
            heads = self.ablated.setdefault(
                layer, torch.zeros(lm.grid.site_of(layer).num_attention_heads, dtype=torch.bool)
            )
            heads[head] = True

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor | None:
        ablated = self.ablated.get(site.layer)
        if ablated is None:
            self.record.note(site, torch.zeros(len(heads_BNHD), site.num_attention_heads, dtype=torch.bool))
            return None
        self.record.note(site, ablated.expand(len(heads_BNHD), -1))
        here = self._here.get(site.layer)
        if here is None:
            here = self._here[site.layer] = ablated.to(heads_BNHD.device)[:, None]
        return heads_BNHD.masked_fill(here, 0.0)


class _RandomVisitor:
    """Draws for all layers of a sequence at once, when its first layer runs."""

    def __init__(self, lm: LoadedModel, what: RandomHeads, record: InterventionRecord) -> None:
        self.shape, self.what, self.record = lm.grid.shape, what, record
        self._keys: list[int] = []
        self._drawn_BLH = torch.empty(0, *self.shape)

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        keys = self._keys_of(len(heads_BNHD))
        if keys != self._keys:
            self._drawn_BLH = torch.stack([self.what.draw(key, self.shape) for key in keys])
            self._keys = keys
        zeroed_BH = self._drawn_BLH[:, site.layer, : site.num_attention_heads]
        self.record.note(site, zeroed_BH)
        return heads_BNHD.masked_fill(zeroed_BH.to(heads_BNHD.device)[:, None, :, None], 0.0)

    def _keys_of(self, sequences: int) -> list[int]:
        keys = self.record.keys
        if keys is None:
            return list(range(sequences))
        keys = keys.tolist() if isinstance(keys, Tensor) else [int(key) for key in keys]
        if len(keys) != sequences or min(keys) < 0:
            raise InterventionError(
                f"keys {keys[:8]} do not fit a batch of {sequences} sequences: random heads are drawn by a number, 0 "
                "or more, for each of them (`keys=` or record.keys)"
            )
        return keys


class _RuleVisitor:
    """Scores a layer's heads from what both hooks show, and ablates them at the second."""

    def __init__(self, lm: LoadedModel, rule: HeadRule, record: InterventionRecord) -> None:
        self.rule, self.record = rule, record
        self.padding = PaddingWatch(lm)
        self._lm = lm
        self._statistics = RuleStatistics(lm, rule.score)
        self._pass = (-1, -1)
        self._given: Tensor | None = None
        self._lengths: dict[tuple[int, int, torch.device], Tensor] = {}

    def attended(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        number, layer = self._pass
        if self.padding.passes != number or site.layer <= layer or self.record.lengths is not self._given:
            # Another pass, perhaps of another batch.
            self._given, self._lengths = self.record.lengths, {}
        self._pass = (self.padding.passes, site.layer)
        return self._statistics.attended(call, self._lengths_of(call.sequences, call.geometry.queries, call.device))

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        lengths = self._lengths_of(heads_BNHD.shape[0], heads_BNHD.shape[1], heads_BNHD.device)
        zeroed_BH = self.rule.ablates(score(self._statistics.visited(site, heads_BNHD, lengths), self.rule.score))
        self.record.note(site, zeroed_BH)
        return heads_BNHD.masked_fill(zeroed_BH[:, None, :, None], 0.0)

    def _lengths_of(self, sequences: int, tokens: int, device: torch.device) -> Tensor:
        """The lengths on a device, looked at and copied there once a pass: a pass waits for the copy."""
        key = (sequences, tokens, device)
        if key not in self._lengths:
            self._lengths[key] = _rule_lengths(self._lm, self._given, self.padding.mask, sequences, tokens).to(device)
        return self._lengths[key]


def _rule_lengths(lm: LoadedModel, given: Tensor | None, mask: object, sequences: int, tokens: int) -> Tensor:
    """Real tokens (B,) of a batch, from the lengths that the caller gave and from the padding mask of the pass.

    Raises:
        InterventionError: They are of another batch, or contradict each other.
        SequenceError: The sequences need other rotary frequencies than the batch.
    """
    sources = {} if given is None else {"given": given}
    if mask is not None:
        sources[mask_argument(lm)] = lengths_in_mask(mask, tokens)
    elif not all(site.causal for site in lm.grid.sites):
        # Every query sees all tokens, padding included.
        sources[f"no {mask_argument(lm)}"] = torch.full((sequences,), tokens)
    lengths = agreed_lengths(sources, sequences, tokens)
    if lm.rope_lengths.vary:
        lm.rope_lengths.check(tokens, lengths.tolist())
    return lengths
