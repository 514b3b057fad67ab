"""Log-likelihoods of several masks together.

The layers below a mask's first ablated head, and the attention of that head's layer, run once, in the baseline. The
baseline runs batch by batch, and each mask's pass goes on from its hidden states and heads' outputs, which are kept for
one batch only. Every number equals that of a separate run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import headscan
from headscan.ablation.intervention import Intervention, InterventionRecord
from headscan.attention.hooks import output_hook
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.layers.blocks import cannot_resume, find_blocks, resuming_at
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.scoring.likelihood import (
    Continued,
    DistinctInput,
    InputResult,
    by_request,
    distinct_inputs,
    score_in_batches,
    score_inputs,
)
from headscan.pipelines.scoring.token_requests import LogLikelihood, Request, Responses, ScoringItem
from headscan.sizing.model_sizes import LayerCache

T = TypeVar("T")

#: Most arms of one bundle, however long their prefixes are.
BUNDLE_SIZE = 8
#: Most arms of one bundle, however short their prefixes are.
_LARGEST_BUNDLE = 64
#: Memory for the prefixes of a bundle, which has one for each arm.
_PREFIX_BYTES = 1 << 30


class Start(NamedTuple):
    """Where a pass starts: the first layer, and True if only the output projection of its attention runs."""

    layer: int
    behind_attention: bool

    @property
    def layers(self) -> float:
        """Layers that do not run; the attention of a layer counts half."""
        return self.layer + 0.5 * self.behind_attention


#: A whole pass.
FROM_TOKENS = Start(0, False)


@dataclass(frozen=True)
class BundleItem(ScoringItem[Request]):
    """Requests for one replica under several masks (None is the whole model), and where the pass of each mask starts.
    All go on from the pass of ``base``, here called the baseline; None is the whole model.
    """

    interventions: tuple[Intervention | None, ...]
    starts: tuple[Start, ...]
    batch_tokens: int
    share_prefixes: bool
    base: Intervention | None = None

    def run(self, lm: LoadedModel) -> list[Responses[LogLikelihood]]:
        """Answer requests under each of the masks."""
        bundled = _Bundle(lm, self)
        reads = distinct_inputs(self.requests)
        with torch.no_grad():
            scored = score_in_batches(lm, reads, self.batch_tokens, self.share_prefixes, bundled.read_on, bundled.score)
            results = dict(scored)
        of_arms = (
            {index: of_read[arm] for index, of_read in results.items()} for arm in range(len(self.interventions))
        )
        return [by_request(reads, of_arm) for of_arm in of_arms]


def possible_starts(lm: LoadedModel, interventions: Sequence[Intervention | None]) -> frozenset[Start]:
    """Pool task: return where passes with these ablations can start; empty for models without separable blocks."""
    try:
        blocks = find_blocks(lm)
        outputs_only = (each for each in interventions if each is not None and not each.replaces_attention)
        behind = {each.first_layer for each in outputs_only if each.first_layer is not None}
        wrong = cannot_resume(blocks), cannot_resume(blocks, behind, behind_attention=True)
    except UnsupportedModelError:
        return frozenset()
    starts = {Start(layer, False) for layer in range(1, len(blocks.all)) if layer not in wrong[0]}
    return frozenset(starts | {Start(layer, True) for layer in behind if layer not in wrong[1]})


def start_of(intervention: Intervention | None, possible: frozenset[Start]) -> Start:
    """Return the last place at which an arm's pass can start."""
    first = None if intervention is None else intervention.first_layer
    if intervention is None or first is None:
        return FROM_TOKENS
    # Everything below is as in the baseline.
    return last_start(Start(first, not intervention.replaces_attention), possible)


def last_start(limit: Start, possible: frozenset[Start]) -> Start:
    """Return the last possible place up to ``limit``."""
    return max((start for start in possible if start <= limit), default=FROM_TOKENS)


def bundle_size(caches: Mapping[str, Sequence[LayerCache]] | None, longest: int) -> int:
    """Return how many arms of one bundle have prefixes that fit into memory. ``caches`` None means that their size is
    unknown; ``longest`` is the most tokens of prefixes that are kept at a time.
    """
    if caches is None:
        return BUNDLE_SIZE
    of_prefix = sum(layer.bytes(longest) for layers in caches.values() for layer in layers)
    return max(BUNDLE_SIZE, min(_LARGEST_BUNDLE, _PREFIX_BYTES // max(1, of_prefix)))


def bundle(arms: Sequence[Intervention | None], possible: frozenset[Start], size: int = BUNDLE_SIZE) -> list[list[int]]:
    """Group arms (indices) that are answered together, at most ``size``; arms that save no layers stay alone."""
    return bundle_starts(
        [None if intervention is None else start_of(intervention, possible) for intervention in arms], size
    )


def bundle_starts(starts: Sequence[Start | None], size: int = BUNDLE_SIZE) -> list[list[int]]:
    """Group passes (indices) by where they start; None is the baseline, from which the others go on."""
    groups: list[list[int]] = []
    filling: list[int] | None = None
    for index, start in enumerate(starts):
        if start == FROM_TOKENS:
            groups.append([index])
        elif filling is None or len(filling) == size:
            filling = [index]
            groups.append(filling)
        else:
            filling.append(index)

    def pays(group: list[int]) -> bool:
        # If the group lacks the baseline, the baseline's pass up to the last mask is an extra cost.
        saved = [0.0 if start is None else start.layers for start in (starts[index] for index in group)]
        return sum(saved) > (0 if any(starts[index] is None for index in group) else max(saved))

    return [part for group in groups for part in ([group] if pays(group) else [[index] for index in group])]


@dataclass(frozen=True)
class _Prefixes:
    baseline: Prefix
    arms: tuple[Prefix, ...]


@dataclass(frozen=True)
class _Kept:
    """The baseline's last pass by layer: its inputs (B, N, E), and the outputs (B, N, H, D) of its heads."""

    hidden: dict[int, Tensor]
    heads: dict[int, Tensor]


class _Bundle:
    """One pass of the baseline, and a shorter one per mask."""

    def __init__(self, lm: LoadedModel, item: BundleItem) -> None:
        self._lm, self._item = lm, item
        self._blocks = find_blocks(lm)
        self._arms = list(zip(item.interventions, item.starts, strict=True))
        self._starts = {start for mask, start in self._arms if mask != item.base}

    def read_on(self, tokens: Sequence[Sequence[int]], parent: _Prefixes | None) -> _Prefixes:
        before = None if parent is None else parent.baseline
        with self._keeping() as kept:
            baseline_read, cache = self._baseline(lambda _: read_prefix(self._lm, tokens, before))
        baseline, arms = baseline_read, []
        if baseline is None:
            assert cache is not None
            baseline = Prefix(cache, len(tokens[0]) + (0 if before is None else before.tokens))
        last = len(self._blocks.all) - 1
        for arm, (mask, start) in enumerate(self._arms):
            # A head changes the keys of higher layers only.
            if mask == self._item.base or start == Start(last, True):
                arms.append(baseline)
                continue
            with self._ablated(mask, start, kept):
                own = read_prefix(self._lm, tokens, None if parent is None else parent.arms[arm])
            arms.append(own.above(start.layer + start.behind_attention, baseline))
        return _Prefixes(baseline, tuple(arms))

    def score(self, reads: list[DistinctInput], after: Continued[_Prefixes]) -> list[list[InputResult]]:
        prefixes = after.prefix

        def continued(prefix: Prefix | None) -> Continued[Prefix]:
            return Continued(after.start, prefix, after.rows)

        with self._keeping() as kept:
            whole = continued(None if prefixes is None else prefixes.baseline)
            baseline, _ = self._baseline(lambda record: score_inputs(self._lm, reads, whole, record))
        of_arms: list[list[InputResult]] = []
        for arm, (mask, start) in enumerate(self._arms):
            if mask == self._item.base:
                assert baseline is not None
                of_arms.append(baseline)
                continue
            own = continued(None if prefixes is None else prefixes.arms[arm])
            with self._ablated(mask, start, kept) as record:
                of_arms.append(score_inputs(self._lm, reads, own, record))
        return [list(of_read) for of_read in zip(*of_arms, strict=True)]

    @contextmanager
    def _keeping(self) -> Iterator[_Kept]:
        behind = {start.layer for start in self._starts if start.behind_attention}
        with (
            self._blocks.keep_inputs({start.layer for start in self._starts}) as hidden,
            self._blocks.keep_heads(behind) as heads,
        ):
            yield _Kept(hidden, heads)

    def _baseline(self, run: Callable[[InterventionRecord | None], T]) -> tuple[T | None, Cache | None]:
        """Run the baseline up to the heads of the last layer that a mask needs, and return the KV cache alone; or run
        all of it and return its result if an arm needs that.
        """
        with ExitStack() as contexts:
            base, record = self._item.base, None
            if base is not None:
                record = contexts.enter_context(headscan.intervene(self._lm, base))
            if base in self._item.interventions:
                return run(record), None
            last = max(self._starts).layer
            caches: list[Cache | None] = []

            def stop(site: AttentionSite, _: Tensor) -> None:
                if site.layer >= last:
                    raise _Stopped

            contexts.enter_context(self._blocks.at(last).watched(lambda _, cache: caches.append(cache)))
            contexts.enter_context(output_hook(self._lm, stop))
            try:
                return run(record), None
            except _Stopped:
                return None, caches[-1]

    @contextmanager
    def _ablated(self, mask: Intervention | None, start: Start, kept: _Kept) -> Iterator[InterventionRecord | None]:
        with ExitStack() as contexts:
            contexts.enter_context(resuming_at(self._blocks, start.layer, kept.hidden[start.layer]))
            if start.behind_attention:
                contexts.enter_context(self._blocks.with_heads(start.layer, kept.heads[start.layer]))
            yield None if mask is None else contexts.enter_context(headscan.intervene(self._lm, mask))


class _Stopped(Exception):
    """Raised to end a pass of the baseline that has computed all that a bundle needs."""
