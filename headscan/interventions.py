"""Silencing heads: a fixed set of them, or by a rule that looks at each input as it runs.

A silenced head's whole output is zero, for all tokens, before the output projection; nothing is renormalised
(arXiv 2504.03889, 1905.10650).

Shapes: B sequences, N tokens, L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.calls import AttentionCall
from headscan.catalog import statistics_for
from headscan.doors import attention_door, output_door
from headscan.errors import InterventionError
from headscan.grid import AttentionSite, Head
from headscan.loading import LoadedModel
from headscan.outputs import OUTPUT_STATISTICS, output_statistics, projection_gram
from headscan.requests import AttentionRequest, MassWidths
from headscan.scores import find_score, score


@dataclass(frozen=True)
class HeadMask:
    """A fixed set of silenced query heads.

    Attributes:
        heads: ``(layer, head)`` pairs.
    """

    heads: tuple[Head, ...]

    def __init__(self, heads: Iterable[tuple[int, int]]) -> None:
        object.__setattr__(self, "heads", tuple(sorted({Head(int(layer), int(head)) for layer, head in heads})))


@dataclass(frozen=True)
class HeadRule:
    """Silences, in every input, the heads whose score for that input lies beyond a threshold.

    Each layer scores its heads on activations that the rule has already changed below it, as in the paper.

    Attributes:
        score: Name of a score; the catalogue says which end is inactive.
        threshold: A head is silenced when its score is strictly beyond it: below, or above where high is inactive.

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

    def silences(self, scores: Tensor) -> Tensor:
        """Which heads the rule silences: bool, shaped like ``scores``."""
        high = find_score(self.score).inactive == "high"
        return scores > self.threshold if high else scores < self.threshold


class InterventionRecord:
    """What an intervention did.

    Attributes:
        zeroed: bool (B, L, H) of the last forward pass: which heads were silenced; False where a layer lacks the head.
            None before the first pass. A mask's is the same for all sequences.
        lengths: Real tokens (B,) of the next forward pass, or None when all tokens are real. A rule reads them; set
            them anew when the batch changes.
    """

    def __init__(self, lm: LoadedModel, lengths: Tensor | Sequence[int] | None) -> None:
        self.zeroed: Tensor | None = None
        self.lengths = None if lengths is None else torch.as_tensor(lengths)
        self._shape = lm.grid.shape
        self._first_layer = lm.grid.sites[0].layer
        self._heads = sum(site.num_attention_heads for site in lm.grid.sites)

    @property
    def zeroed_share(self) -> float:
        """Share of all (sequence, head) pairs that were silenced in the last forward pass."""
        if self.zeroed is None:
            raise InterventionError("no forward pass has run yet: run the model inside the context first")
        return float(self.zeroed.sum()) / (len(self.zeroed) * self._heads)

    def note(self, site: AttentionSite, zeroed_BH: Tensor) -> None:
        """Write down what was silenced in one layer."""
        if self.zeroed is None or site.layer == self._first_layer:
            self.zeroed = torch.zeros(len(zeroed_BH), *self._shape, dtype=torch.bool)
        self.zeroed[:, site.layer, : zeroed_BH.shape[1]] = zeroed_BH.cpu()


@contextmanager
def intervene(
    lm: LoadedModel, what: HeadMask | HeadRule, *, lengths: Tensor | Sequence[int] | None = None
) -> Iterator[InterventionRecord]:
    """Silence heads for as long as the context is open; contexts can be nested, inside and around `collect` too.

    Args:
        lm: A model from `headscan.load`.
        what: A mask or a rule.
        lengths: Real tokens of each sequence (B,) of the batch to come; None: all tokens are real. Only a rule needs
            them.

    Raises:
        HeadIndexError: The mask names a head that the model lacks.
        InterventionError: Lengths do not fit the batch, or a rule is to look at cross attention.
    """
    record = InterventionRecord(lm, lengths)
    with ExitStack() as doors:
        if isinstance(what, HeadMask):
            doors.enter_context(output_door(lm, _MaskVisitor(lm, what, record)))
        else:
            visitor = _RuleVisitor(lm, what, record)
            # Also for a rule that needs no weights: this door tells whole inputs from the steps of a KV cache.
            doors.enter_context(attention_door(lm, visitor.attended))
            doors.enter_context(output_door(lm, visitor.visited))
        yield record


class _MaskVisitor:
    def __init__(self, lm: LoadedModel, mask: HeadMask, record: InterventionRecord) -> None:
        self.record = record
        self.silenced: dict[int, Tensor] = {}
        for layer, head in lm.grid.check(mask.heads):
            heads = self.silenced.setdefault(
                layer, torch.zeros(lm.grid.site_of(layer).num_attention_heads, dtype=torch.bool)
            )
            heads[head] = True

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor | None:
        silenced = self.silenced.get(site.layer)
        if silenced is None:
            self.record.note(site, torch.zeros(len(heads_BNHD), site.num_attention_heads, dtype=torch.bool))
            return None
        self.record.note(site, silenced.expand(len(heads_BNHD), -1))
        return heads_BNHD.masked_fill(silenced.to(heads_BNHD.device)[:, None], 0.0)


class _RuleVisitor:
    """Scores a layer's heads from what both doors show, and silences them at the second."""

    def __init__(self, lm: LoadedModel, rule: HeadRule, record: InterventionRecord) -> None:
        if lm.grid.kind == "cross":
            raise InterventionError(
                f"a rule by {rule.score} cannot look at cross attention, whose keys are another text: use a HeadMask"
            )
        self.lm, self.rule, self.record = lm, rule, record
        self.wanted = statistics_for([rule.score])
        self._from_attention: dict[str, Tensor] = {}

    def attended(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        lengths = self._lengths(call.sequences, call.geometry.queries, call.device)
        request = AttentionRequest(self.wanted - OUTPUT_STATISTICS, lengths, lengths, MassWidths())
        out, self._from_attention = call.measure(request)
        return out

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        lengths = self._lengths(heads_BNHD.shape[0], heads_BNHD.shape[1], heads_BNHD.device)
        gram = None
        if "projected_output_norm" in self.wanted:
            gram = projection_gram(self.lm.module(site.output_projection), site).to(heads_BNHD.device)
        statistics = output_statistics(heads_BNHD, lengths, self.wanted & OUTPUT_STATISTICS, gram)
        zeroed_BH = self.rule.silences(score({**self._from_attention, **statistics}, self.rule.score))
        self.record.note(site, zeroed_BH)
        return heads_BNHD.masked_fill(zeroed_BH[:, None, :, None], 0.0)

    def _lengths(self, sequences: int, tokens: int, device: torch.device) -> Tensor:
        lengths = self.record.lengths
        if lengths is None:
            return torch.full((sequences,), tokens, device=device)
        if lengths.shape != (sequences,) or int(lengths.max()) > tokens or int(lengths.min()) < 1:
            raise InterventionError(
                f"lengths {lengths.tolist()[:8]} do not fit a batch of {sequences} sequences of {tokens} tokens: a "
                "rule looks at whole inputs, so give their lengths (`lengths=` or record.lengths) and use no KV cache"
            )
        return lengths.to(device)
