"""Log-likelihoods of several masks together.

Layers below a mask's first ablated head run once, in the baseline.

The baseline runs batch by batch, and each mask's pass starts at the layer of its first ablated head, from the hidden
states of the baseline. They are kept for one batch only, and every number equals that of a separate run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import headscan
from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.errors import UnsupportedModelError
from headscan.layers.blocks import find_blocks
from headscan.layers.layer_range_pass import resuming_at
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.layers.resume_check import cannot_resume
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.scoring.likelihood import answer_reads
from headscan.pipelines.scoring.prefix_walk import Continued, walk
from headscan.pipelines.scoring.reads import LikelihoodResult, Read, ReadAnswer, by_request, distinct_reads
from headscan.pipelines.scoring.token_requests import Request
from headscan.sizing.kv_cache import LayerCache

T = TypeVar("T")

#: Most arms of one bundle, however long their prefixes are.
LEAST_SIZE = 8
#: Most arms of one bundle, however short their prefixes are.
_MOST_SIZE = 64
#: Memory for the prefixes of a bundle, which has one for each arm.
_PREFIX_BYTES = 1 << 30


@dataclass(frozen=True)
class BundleItem:
    """Requests for one replica, answered under several masks.

    Attributes:
        masks: Masks; None is the baseline.
        resume_layers: The layer at which the pass of each mask starts; it ablates no head below.
    """

    name: str
    requests: tuple[Request, ...]
    masks: tuple[Ablation | None, ...]
    resume_layers: tuple[int, ...]
    batch_tokens: int
    share_prefixes: bool

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return score_bundle(lm, self)


def resumable_layers(lm: LoadedModel, item: object) -> frozenset[int]:
    """Pool task: return the layers at which passes can start.

    There are none if the model has no separable blocks.
    """
    try:
        blocks = find_blocks(lm)
        return frozenset(range(len(blocks.all))) - cannot_resume(blocks).keys()
    except UnsupportedModelError:
        return frozenset()


def resume_layer(ablated: Ablation | None, resumable: frozenset[int]) -> int | None:
    """Return the last layer at which an arm's pass can start.

    None means that it must start at the tokens.
    """
    first = None if ablated is None else ablated.first_layer
    if first is None:
        return None
    return max((layer for layer in resumable if 0 < layer <= first), default=None)


def bundle_size(caches: Mapping[str, Sequence[LayerCache]] | None, longest: int) -> int:
    """Return the number of arms of one bundle whose prefixes fit into memory.

    Args:
        caches: KV caches of the model; None if they are unknown.
        longest: Tokens of the longest request.
    """
    if caches is None:
        return LEAST_SIZE
    each = sum(layer.bytes(longest) for layers in caches.values() for layer in layers)
    return max(LEAST_SIZE, min(_MOST_SIZE, _PREFIX_BYTES // max(1, each)))


def bundle(arms: Sequence[Ablation | None], resumable: frozenset[int], size: int = LEAST_SIZE) -> list[list[int]]:
    """Group arms (indices) that are answered together, at most ``size`` of them.

    Arms that would not save layers stay alone.
    """
    groups: list[list[int]] = []
    filling: list[int] | None = None
    for index, ablated in enumerate(arms):
        if ablated is not None and resume_layer(ablated, resumable) is None:
            groups.append([index])
        elif filling is None or len(filling) == size:
            filling = [index]
            groups.append(filling)
        else:
            filling.append(index)

    def pays(group: list[int]) -> bool:
        # If the group lacks the baseline, the baseline's pass up to the last mask is an extra cost.
        starts = [resume_layer(arms[index], resumable) or 0 for index in group]
        return sum(starts) > (0 if any(arms[index] is None for index in group) else max(starts))

    return [part for group in groups for part in ([group] if pays(group) else [[index] for index in group])]


def score_bundle(lm: LoadedModel, item: BundleItem) -> list[LikelihoodResult]:
    """Pool task: answer requests under each of the masks."""
    bundled = _Bundle(lm, item)
    reads = distinct_reads(item.requests)
    with torch.no_grad():
        found = dict(walk(lm, reads, item.batch_tokens, item.share_prefixes, bundled.read_on, bundled.answer))
    return [by_request(reads, {i: answers[arm] for i, answers in found.items()}) for arm in range(len(item.masks))]


@dataclass(frozen=True)
class _Prefixes:
    """Cached prefixes of the baseline and of each arm."""

    baseline: Prefix
    arms: tuple[Prefix, ...]


class _Bundle:
    """One pass of the baseline, and a shorter one per mask."""

    def __init__(self, lm: LoadedModel, item: BundleItem) -> None:
        self._lm, self._item = lm, item
        self._blocks = find_blocks(lm)
        self._resumed = {layer for mask, layer in zip(item.masks, item.resume_layers, strict=True) if mask is not None}

    def read_on(self, tokens: Sequence[Sequence[int]], parent: _Prefixes | None) -> _Prefixes:
        before = None if parent is None else parent.baseline
        with self._blocks.keep_inputs(self._resumed) as kept:
            found, cache = self._baseline(lambda: read_prefix(self._lm, tokens, before))
        baseline, arms = found, []
        if baseline is None:
            assert cache is not None
            baseline = Prefix(cache, len(tokens[0]) + (0 if before is None else before.tokens))
        last = self._lm.grid.sites[-1].layer
        for arm, (mask, layer) in enumerate(zip(self._item.masks, self._item.resume_layers, strict=True)):
            # A head changes the keys of higher layers only.
            if mask is None or (found is not None and mask.first_layer == last):
                arms.append(baseline)
                continue
            with self._ablated(mask, layer, kept):
                own = read_prefix(self._lm, tokens, None if parent is None else parent.arms[arm])
            arms.append(own.above(layer, baseline))
        return _Prefixes(baseline, tuple(arms))

    def answer(self, reads: list[Read], after: Continued[_Prefixes]) -> list[list[ReadAnswer]]:
        """Return the answers of all arms for each read."""
        prefixes = after.prefix

        def continued(prefix: Prefix | None) -> Continued[Prefix]:
            return Continued(after.start, prefix, after.rows)

        with self._blocks.keep_inputs(self._resumed) as kept:
            whole = continued(None if prefixes is None else prefixes.baseline)
            baseline, _ = self._baseline(lambda: answer_reads(self._lm, reads, whole, None))
        of_arms: list[list[ReadAnswer]] = []
        for arm, (mask, layer) in enumerate(zip(self._item.masks, self._item.resume_layers, strict=True)):
            if mask is None:
                assert baseline is not None
                of_arms.append(baseline)
                continue
            own = continued(None if prefixes is None else prefixes.arms[arm])
            with self._ablated(mask, layer, kept) as record:
                of_arms.append(answer_reads(self._lm, reads, own, record))
        return [list(answers) for answers in zip(*of_arms, strict=True)]

    def _baseline(self, run: Callable[[], T]) -> tuple[T | None, Cache | None]:
        """Run the baseline, up to the layer at which the last mask starts if no arm needs its result.

        Returns:
            The result, or None and the KV cache of the layers that ran.
        """
        if None in self._item.masks:
            return run(), None
        with self._blocks.at(max(self._resumed)).watched(_stop):
            try:
                return run(), None
            except _Stopped as stopped:
                return None, stopped.cache

    @contextmanager
    def _ablated(self, mask: Ablation, layer: int, kept: dict[int, Tensor]) -> Iterator[InterventionRecord]:
        with ExitStack() as contexts:
            contexts.enter_context(resuming_at(self._blocks, layer, kept[layer]))
            yield contexts.enter_context(headscan.intervene(self._lm, mask))


class _Stopped(Exception):
    """The baseline has reached the last layer that a bundle needs."""

    def __init__(self, cache: Cache | None) -> None:
        super().__init__()
        self.cache = cache


def _stop(_: Tensor, cache: Cache | None) -> None:
    raise _Stopped(cache)
