"""Rules: heads are ablated if their score for the input is beyond a threshold.

Shapes: B sequences, N tokens, H query heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.padding import PaddingWatch, agreed_lengths, lengths_in_mask, mask_argument
from headscan.ablation.record import InterventionRecord
from headscan.ablation.replacements import ZERO, Filler, Replacement
from headscan.ablation.rule_statistics import RuleStatistics
from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook, output_hook
from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.measure.scores import find_score, score
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class HeadRule(Ablation):
    """Ablates, for each input, the heads whose score is beyond a threshold.

    Each layer scores its heads on activations that the rule has already changed in the layers below (arXiv 2504.03889).

    Attributes:
        score: Name of a score; the catalogue defines which end is inactive.
        threshold: A head is ablated if its score is strictly below it, or strictly above it if high is inactive.
        replacement: What takes the place of its output: zero, `HeadMeans` or `HeadSamples`.

    Raises:
        UnknownNameError: The catalogue has no such score.
        InterventionError: The threshold is NaN.
    """

    score: str
    threshold: float
    replacement: Replacement = ZERO

    def __post_init__(self) -> None:
        find_score(self.score)
        if not self.threshold == self.threshold:
            raise InterventionError(f"threshold of {self.score}: NaN. Set `threshold` to a number")

    @property
    def label(self) -> str:
        return f"rule by {self.score}"

    @property
    def replaces_by(self) -> Replacement:
        return self.replacement

    @property
    def needs_whole_input(self) -> bool:
        return True

    @property
    def may_share_rows(self) -> bool:
        return self.replacement.position_free

    @property
    def score_name(self) -> str:
        return self.score

    @property
    def score_threshold(self) -> float:
        return self.threshold

    def ablates(self, scores: Tensor) -> Tensor:
        """Return which heads the rule ablates: bool, shaped like ``scores``."""
        high = find_score(self.score).inactive == "high"
        return scores > self.threshold if high else scores < self.threshold

    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None) -> Tensor:
        if scores_BH is None:
            raise InterventionError(f"scores of layer {site.layer}: None. Pass scores_BH of {self.score}")
        return self.ablates(scores_BH)

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        hook = _RuleHook(lm, self, record)
        # Rules that need no weights use the attention hook too: it tells whole inputs from the steps of a KV cache.
        with hook.padding.watching(), attention_hook(lm, hook.attended), output_hook(lm, hook.visited):
            yield


class _RuleHook:
    """Scores a layer's heads from both hooks, and ablates them in the second."""

    def __init__(self, lm: LoadedModel, rule: HeadRule, record: InterventionRecord) -> None:
        rule.check_values(lm.grid)
        self.rule, self.record = rule, record
        self._fill = Filler(rule.replacement, record)
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
        return self._fill(site, heads_BNHD, zeroed_BH)

    def _lengths_of(self, sequences: int, tokens: int, device: torch.device) -> Tensor:
        """Return the lengths on a device; computed and copied once a pass, since the pass waits for the copy."""
        key = (sequences, tokens, device)
        if key not in self._lengths:
            self._lengths[key] = _rule_lengths(self._lm, self._given, self.padding.mask, sequences, tokens).to(device)
        return self._lengths[key]


def _rule_lengths(lm: LoadedModel, given: Tensor | None, mask: object, sequences: int, tokens: int) -> Tensor:
    """Return real tokens (B,) of a batch, from the caller's lengths and the padding mask of the pass.

    Raises:
        InterventionError: Lengths and mask do not fit the batch, or contradict each other.
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
