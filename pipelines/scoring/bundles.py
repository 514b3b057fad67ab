"""Masks that are answered together: what lies below a mask's first ablated head is the baseline's, and runs once.

The baseline runs batch by batch, and each mask's pass begins where its first head is ablated, from the hidden states
that the baseline had there. Nothing of it is kept longer than for a batch, and every number is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import headscan
from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.errors import UnsupportedModelError
from headscan.layers.blocks import find_blocks
from headscan.layers.layer_range_pass import resuming_at
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.layers.resume_check import cannot_resume
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.scoring.likelihood import (
    LikelihoodResult,
    Read,
    ReadAnswer,
    answer_reads,
    by_request,
    distinct_reads,
    walk,
)
from headscan.pipelines.scoring.token_requests import Request

#: So many masks are answered together at most: the hidden states and prefixes of all exist at one time.
_MOST = 8


@dataclass(frozen=True)
class BundleItem:
    """Requests for one replica, to be answered with one mask after another.

    Attributes:
        masks: Masks; None is the baseline itself.
        resume_layers: The layer where the pass of each begins: none of its heads lies below.
    """

    name: str
    requests: tuple[Request, ...]
    masks: tuple[Ablation | None, ...]
    resume_layers: tuple[int, ...]
    batch_tokens: int
    share_prefixes: bool


def resumable_layers(lm: LoadedModel, item: object) -> frozenset[int]:
    """A pool task: the layers where a forward pass can begin; none where the model cannot be taken apart."""
    try:
        blocks = find_blocks(lm)
        return frozenset(range(len(blocks.all))) - cannot_resume(blocks).keys()
    except UnsupportedModelError:
        return frozenset()


def resume_layer(ablated: Ablation | None, resumable: frozenset[int]) -> int | None:
    """Where the pass of an arm can begin: the deepest such layer with no ablated head below; None: of no use."""
    first = None if ablated is None else ablated.first_layer
    if first is None:
        return None
    return max((layer for layer in resumable if 0 < layer <= first), default=None)


def bundle(arms: Sequence[Ablation | None], resumable: frozenset[int]) -> list[list[int]]:
    """Arms that are answered together, by their index: those alone for which it would not pay."""
    groups: list[list[int]] = []
    filling: list[int] | None = None
    for index, ablated in enumerate(arms):
        if ablated is not None and resume_layer(ablated, resumable) is None:
            groups.append([index])
        elif filling is None or len(filling) == _MOST:
            filling = [index]
            groups.append(filling)
        else:
            filling.append(index)
    layers = max(resumable, default=0) + 1

    def pays(group: list[int]) -> bool:
        # Without the baseline's own answers its pass comes on top.
        saved = sum(resume_layer(arms[index], resumable) or 0 for index in group)
        return saved > (0 if any(arms[index] is None for index in group) else layers)

    return [part for group in groups for part in ([group] if pays(group) else [[index] for index in group])]


def score_bundle(lm: LoadedModel, item: BundleItem) -> list[LikelihoodResult]:
    """A pool task: answer requests with each of the masks."""
    bundled = _Bundle(lm, item)
    reads = distinct_reads(item.requests)
    with torch.no_grad():
        found = dict(walk(lm, reads, item.batch_tokens, item.share_prefixes, bundled.read_on, bundled.answer))
    return [by_request(reads, {i: answers[arm] for i, answers in found.items()}) for arm in range(len(item.masks))]


@dataclass(frozen=True)
class _Prefixes:
    """The baseline's prefix, and that of each arm."""

    baseline: Prefix
    arms: tuple[Prefix, ...]


class _Bundle:
    """One forward pass of the baseline and one of each mask, which begins further up."""

    def __init__(self, lm: LoadedModel, item: BundleItem) -> None:
        self._lm, self._item = lm, item
        self._blocks = find_blocks(lm)
        self._resumed = {layer for mask, layer in zip(item.masks, item.resume_layers, strict=True) if mask is not None}

    def read_on(self, tokens: Sequence[int], parent: _Prefixes | None) -> _Prefixes:
        with self._blocks.keep_inputs(self._resumed) as kept:
            baseline = read_prefix(self._lm, tokens, None if parent is None else parent.baseline)
        arms = []
        for arm, (mask, layer) in enumerate(zip(self._item.masks, self._item.resume_layers, strict=True)):
            if mask is None:
                arms.append(baseline)
                continue
            with self._ablated(mask, layer, kept):
                own = read_prefix(self._lm, tokens, None if parent is None else parent.arms[arm])
            arms.append(own.above(layer, baseline))
        return _Prefixes(baseline, tuple(arms))

    def answer(self, reads: list[Read], start: int, prefixes: _Prefixes | None) -> list[list[ReadAnswer]]:
        """Of each read, the answers of all arms."""
        with self._blocks.keep_inputs(self._resumed) as kept:
            prefix = None if prefixes is None else prefixes.baseline
            baseline = answer_reads(self._lm, reads, start, prefix, None)
        of_arms = []
        for arm, (mask, layer) in enumerate(zip(self._item.masks, self._item.resume_layers, strict=True)):
            if mask is None:
                of_arms.append(baseline)
                continue
            prefix = None if prefixes is None else prefixes.arms[arm]
            with self._ablated(mask, layer, kept) as record:
                of_arms.append(answer_reads(self._lm, reads, start, prefix, record))
        return [list(answers) for answers in zip(*of_arms, strict=True)]

    @contextmanager
    def _ablated(self, mask: Ablation, layer: int, kept: dict[int, Tensor]) -> Iterator[InterventionRecord]:
        with ExitStack() as contexts:
            contexts.enter_context(resuming_at(self._blocks, layer, kept[layer]))
            yield contexts.enter_context(headscan.intervene(self._lm, mask))
