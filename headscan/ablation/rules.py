"""Rules: heads are ablated if their score for the input is beyond a threshold.

The statistics that a score needs are measured at both hooks while a layer runs, over the real tokens, whose number
comes from the arguments of the forward pass and from the record. `ScoredAblation` does that for every ablation that
scores decide; `HeadRule` adds the threshold.

Shapes: B sequences, N tokens, H query heads, D and Dv width of a head's output.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import isnan
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from headscan.ablation.intervention import ZERO, InterventionRecord, LayerwiseAblation, OutputReplacer, Replacement
from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook, output_hook, watched_passes
from headscan.catalog import MassWidths, statistics_for
from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.measure.collect import refuse_left_padding
from headscan.models.forward_inputs import TokenMeans, real_tokens
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.norm_statistics import ProjectionFactors
from headscan.statistics.registry import JOINABLE, OUTPUT_STATISTICS, masks_read, needs_projection, output_statistics
from headscan.statistics.scores import find_score, score
from headscan.statistics.weight_statistics import AttentionRequest


class ScoreStatistics:
    """The statistics ``wanted`` of one score, measured layer by layer; None measures nothing."""

    def __init__(self, lm: LoadedModel, score_name: str | None, widths: MassWidths | None = None) -> None:
        if score_name is not None:
            _check_measurable(score_name)
            if lm.grid.reads_encoder:
                raise InterventionError(
                    f"an ablation cannot score {lm.grid.kind} attention: {score_name}. Use a HeadMask, or another site"
                )
        self.score_name, self._widths = score_name, widths or MassWidths()
        self.wanted = statistics_for([] if score_name is None else [score_name])
        self._factors = ProjectionFactors(lm) if needs_projection(self.wanted) else None
        self._from_attention: dict[str, Tensor] = {}

    def fresh(self) -> ScoreStatistics:
        """Return statistics of the same score that have measured nothing yet, and share what follows from the model."""
        statistics = copy.copy(self)
        statistics._from_attention = {}
        return statistics

    def attend(self, call: AttentionCall, lengths: Tensor, past: int = 0) -> Tensor:
        """Measure an attention call and return its output; ``past`` counts the cached tokens before it."""
        names = self.wanted - OUTPUT_STATISTICS.keys()
        request = AttentionRequest(names, lengths, lengths, self._widths, past=past)
        out, self._from_attention = call.measure(request)
        return out

    def layer_statistics(self, site: AttentionSite, outputs_BNHD: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Add the statistics of the heads' outputs and return all of the layer, float32 (B, H) each."""
        factor = None if self._factors is None else self._factors.of(site).to(outputs_BNHD.device)
        from_outputs = output_statistics(outputs_BNHD, TokenMeans(lengths), self.wanted, factor)
        return {**self._from_attention, **from_outputs}


def mask_argument(lm: LoadedModel) -> str:
    """Return the name of the padding mask of the sequences that the model's sites read."""
    return "decoder_attention_mask" if lm.is_encoder_decoder and lm.grid.kind != "encoder" else "attention_mask"


class PaddingWatch:
    """Counts forward passes and keeps the padding mask and the token ids of the current one: None for a pass without
    them.
    """

    def __init__(self, lm: LoadedModel) -> None:
        self.passes = 0
        self.mask: Any = None
        self.ids: Any = None
        self._model = lm.model
        self._name = mask_argument(lm)
        self._ids_name = self._name.replace("attention_mask", "input_ids")

    def watching(self) -> AbstractContextManager[None]:
        return watched_passes(self._model, self._begin, lambda: None)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.passes += 1
        if args:
            kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        self.mask, self.ids = kwargs.get(self._name), kwargs.get(self._ids_name)


def lengths_in_mask(mask: Any, tokens: int) -> Tensor:
    """Return the real tokens (B,) of a padding mask (B, N), on the CPU."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        what = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        raise InterventionError(
            f"the attention mask has {what} (limit 2), but rules read lengths from it. Give a padding mask "
            "(sequences, tokens) with 1 for real tokens"
        )
    if mask.shape[1] != tokens:
        raise InterventionError(
            f"the attention mask covers {mask.shape[1]} tokens (limit {tokens}, those of the pass), but rules "
            "need whole inputs. Use no KV cache (`use_cache=False`)"
        )
    real = mask.detach().cpu().bool()
    lengths = real.sum(1)
    if bool((wrong := (real != real_tokens(lengths, tokens)).any(1)).any()):
        raise InterventionError(
            f"the attention mask hides tokens before real ones in sequence {int(wrong.nonzero()[0])}, but rules need "
            "sequences that start at token 0. Pad on the right (tokenizer.padding_side = 'right')"
        )
    return lengths


def agreed_lengths(sources: Mapping[str, Tensor], sequences: int, tokens: int) -> Tensor:
    """Return the real tokens (B,) on which all sources, by name, agree; without sources all tokens are real."""
    agreed: tuple[str, Tensor] | None = None
    for name, lengths in sources.items():
        if lengths.shape != (sequences,) or int(lengths.max()) > tokens or int(lengths.min()) < 1:
            raise InterventionError(
                f"lengths {lengths.tolist()[:8]} ({name}) do not fit a batch of {sequences} sequences of {tokens} "
                "tokens, and rules need whole inputs. Set `lengths` (or record.lengths) and use no KV cache"
            )
        if agreed is not None and not torch.equal(agreed[1].cpu(), lengths.cpu()):
            raise InterventionError(
                f"the lengths of a pass contradict each other: {agreed[1].tolist()[:8]} ({agreed[0]}), "
                f"{lengths.tolist()[:8]} ({name}). Give one of them, or equal ones"
            )
        agreed = (name, lengths)
    return torch.full((sequences,), tokens) if agreed is None else agreed[1]


class ScoredAblation(LayerwiseAblation):
    """An ablation whose heads follow, in each layer, from their scores for the input, on activations that it has
    already changed in the layers below. A subclass has a ``label``, the score, and `heads_at`; like every
    `Intervention` it is hashable and picklable, such as a frozen dataclass.

    It measures what `collect` measures. Scores on statistics that depend on token ids (``confidence``) are refused,
    because hooks see none.
    """

    needs_whole_input = True

    @property
    @abstractmethod
    def scored_by(self) -> tuple[str, MassWidths]:
        """The score, with the widths of its masses."""

    @property
    def may_share_rows(self) -> bool:
        return super().may_share_rows and statistics_for([self.scored_by[0]]) <= JOINABLE

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        # Evaluations read prompts of one prefix in one row, where `layers/shared_rows.py` asks `heads_at` instead.
        hook = _ScoreHook(lm, self, record)
        # Scores that need no weights use the attention hook too: it tells whole inputs from the steps of a KV cache.
        with hook.padding.watching(), attention_hook(lm, hook.on_attention), output_hook(lm, hook.on_outputs):
            yield


@dataclass(frozen=True)
class HeadRule(ScoredAblation):
    """Ablates, for each input, the heads whose score is beyond a threshold. Each layer scores its heads on activations
    that the rule has already changed in the layers below (arXiv 2504.03889).

    Attributes:
        score: Name of a score; the catalogue defines which end is inactive.
        threshold: A head is ablated if its score is strictly below it, or strictly above it if high is inactive.
        replacement: What takes the place of its output: zero, `HeadMeans` or `HeadSamples`.
        widths: Widths of sink and recent mass, for scores on them; those of the scan that gave the threshold.

    Raises:
        UnknownNameError: The catalogue has no such score.
        InterventionError: The threshold is NaN or no number, or the score depends on token ids.
    """

    score: str
    threshold: float
    replacement: Replacement = ZERO
    widths: MassWidths = field(default_factory=MassWidths)

    def __post_init__(self) -> None:
        _check_measurable(self.score)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, Real) or isnan(self.threshold):
            raise InterventionError(f"`threshold={self.threshold!r}` of {self.score} is not a number. Set `threshold`")

    @property
    def label(self) -> str:
        return f"rule by {self.score}"

    @property
    def scored_by(self) -> tuple[str, MassWidths]:
        return self.score, self.widths

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


def _check_measurable(score_name: str) -> None:
    """Raise if hooks cannot measure a score."""
    find_score(score_name)
    for name in sorted(statistics_for([score_name])):
        if masks_read({name}):
            raise InterventionError(
                f"ablations by score measure no score on {name}, which depends on token ids, because hooks see none: "
                f"{score_name}. Use another score, or a mask of the heads that a scan ranks by it"
            )


class _ScoreHook:
    """Scores a layer's heads from both hooks, and ablates them in the second."""

    def __init__(self, lm: LoadedModel, ablation: ScoredAblation, record: InterventionRecord) -> None:
        ablation.check_replacement(lm.grid)
        self.ablation, self.record = ablation, record
        self._replacer = OutputReplacer(ablation.replacement, record)
        self.padding = PaddingWatch(lm)
        self._lm = lm
        self._score_name, widths = ablation.scored_by
        self._statistics = ScoreStatistics(lm, self._score_name, widths)
        self._pass_and_layer = (-1, -1)
        self._record_lengths: Tensor | None = None
        self._lengths: dict[tuple[int, int, torch.device], Tensor] = {}

    def on_attention(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        last_pass, last_layer = self._pass_and_layer
        if (
            self.padding.passes != last_pass
            or site.layer <= last_layer
            or self.record.lengths is not self._record_lengths
        ):
            # Another pass, perhaps of another batch.
            self._record_lengths, self._lengths = self.record.lengths, {}
        self._pass_and_layer = (self.padding.passes, site.layer)
        return self._statistics.attend(call, self._lengths_of(call.sequences, call.geometry.queries, call.device))

    def on_outputs(self, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor:
        lengths = self._lengths_of(outputs_BNHD.shape[0], outputs_BNHD.shape[1], outputs_BNHD.device)
        scores_BH = score(self._statistics.layer_statistics(site, outputs_BNHD, lengths), self._score_name)
        ablated_BH = self.ablation.heads_at(site, scores_BH)
        self.record.note(site, ablated_BH)
        return self._replacer(site, outputs_BNHD, ablated_BH)

    def _lengths_of(self, sequences: int, tokens: int, device: torch.device) -> Tensor:
        """Return the lengths on a device; computed and copied once a pass, since the pass waits for the copy."""
        key = (sequences, tokens, device)
        if key not in self._lengths:
            lengths = _rule_lengths(self._lm, self._record_lengths, self.padding, sequences, tokens)
            self._lengths[key] = lengths.to(device)
        return self._lengths[key]


def _rule_lengths(
    lm: LoadedModel, record_lengths: Tensor | None, padding: PaddingWatch, sequences: int, tokens: int
) -> Tensor:
    """Return real tokens (B,) of a batch, from the caller's lengths and the padding mask of the pass."""
    mask, ids = padding.mask, padding.ids
    sources = {} if record_lengths is None else {"given": record_lengths}
    if mask is not None:
        sources[mask_argument(lm)] = lengths_in_mask(mask, tokens)
    elif not all(site.causal for site in lm.grid.sites):
        # Every query sees all tokens, padding included.
        sources[f"no {mask_argument(lm)}"] = torch.full((sequences,), tokens)
    lengths = agreed_lengths(sources, sequences, tokens)
    if record_lengths is not None and isinstance(ids, Tensor) and ids.shape == (sequences, tokens):
        refuse_left_padding(lm, ids, lengths, decoder=mask_argument(lm).startswith("decoder"))
    if lm.rope_lengths.vary:
        lm.rope_lengths.check(tokens, lengths.tolist())
    return lengths
