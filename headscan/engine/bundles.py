"""Log-likelihoods of several masks together.

The layers below a mask's first ablated head, and the attention of that head's layer, run once, in the baseline. The
baseline runs batch by batch, and each mask's pass goes on from its hidden states and heads' outputs, which are kept for
one batch only. Every number equals that of a separate run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import headscan
from headscan.ablation.intervention import Intervention, InterventionRecord
from headscan.attention.hooks import output_hook
from headscan.engine.likelihood import (
    Continued,
    DistinctInput,
    InputResult,
    answer_in_batches,
    answer_inputs,
    by_request,
    distinct_inputs,
)
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.layers.blocks import cannot_resume, find_blocks, resuming_at
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.models.loaded_model import LoadedModel
from headscan.sizing.model_sizes import LayerCache
from headscan.texts.token_requests import LogLikelihood, Request, Responses

#: Most arms of one bundle, however long their prefixes are, and however slow the model is.
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
    def skipped_layers(self) -> float:
        """Layers that do not run; the attention of a layer counts half."""
        return self.layer + 0.5 * self.behind_attention


#: A whole pass.
FROM_TOKENS = Start(0, False)


def bundled_likelihoods(
    lm: LoadedModel,
    requests: Sequence[Request],
    changes: Sequence[Intervention | None],
    starts: Sequence[Start],
    batch_tokens: int,
    share_prefixes: bool,
    base: Intervention | None = None,
) -> list[Responses[LogLikelihood]]:
    """Answer requests under each of several changes (None is the whole model), whose passes have their own ``starts``.
    All go on from the pass of ``base``, here called the baseline; None is the whole model.
    """
    bundled = _Bundle(lm, changes, starts, base)
    inputs = distinct_inputs(requests)
    share = share_prefixes and all(change is None or change.may_share_prefix for change in changes)
    with torch.no_grad():
        scored = answer_in_batches(lm, inputs, batch_tokens, share, bundled.read_prefixes, bundled.answer)
        results_of_arms = dict(scored)
    return [
        by_request(inputs, {index: results[arm] for index, results in results_of_arms.items()})
        for arm in range(len(changes))
    ]


def possible_starts(lm: LoadedModel, changes: Sequence[Intervention | None]) -> frozenset[Start]:
    """Return where passes under these changes can start; empty for models without separable blocks. Short passes show
    it, once for each place of a model.
    """
    try:
        blocks = find_blocks(lm)
    except UnsupportedModelError:
        return frozenset()
    behind = {
        change.first_layer
        for change in changes
        if change is not None and change.first_layer is not None and not change.uses_headscan_kernels
    }
    places = {Start(layer, False) for layer in range(1, len(blocks.all))} | {Start(layer, True) for layer in behind}
    for behind_attention in (False, True):
        layers = {start.layer for start in places if start.behind_attention == behind_attention}
        new = {layer for layer in layers if _check_of(lm, Start(layer, behind_attention)) not in lm.checks}
        if new:
            try:
                refused = cannot_resume(blocks, new, behind_attention=behind_attention)
            except UnsupportedModelError as problem:
                refused = dict.fromkeys(new, str(problem))
            lm.checks.update((_check_of(lm, Start(layer, behind_attention)), layer not in refused) for layer in new)
    return frozenset(start for start in places if lm.checks[_check_of(lm, start)])


def _check_of(lm: LoadedModel, start: Start) -> tuple[str, str]:
    return f"a pass starts at layer {start.layer}{', behind its attention' * start.behind_attention}", lm.dtype


def latest_start(change: Intervention | None, base: Intervention | None = None) -> Start:
    """Return the last place at which the pass under a change may leave that of ``base``, by the change alone: for a
    mask with heads of layers 5 and 7, behind the attention of layer 5. Everything below is as under ``base``.
    """
    one, other = (base, change) if change is None else (change, base)
    first = None if one is None else one.first_difference(other)
    return FROM_TOKENS if one is None or first is None else Start(first, not one.uses_headscan_kernels)


def start_of(change: Intervention | None, possible: frozenset[Start], base: Intervention | None = None) -> Start:
    """Return the last place at which the pass under a change can start, of those ``possible`` for the model."""
    latest = latest_start(change, base)
    return max((start for start in possible if start <= latest), default=FROM_TOKENS)


def bundle_size(caches: Mapping[str, Sequence[LayerCache]] | None, longest: int) -> int:
    """Return how many arms of one bundle have prefixes that fit into memory. ``caches`` None means that their size is
    unknown; ``longest`` is the most tokens of prefixes that are kept at a time.
    """
    if caches is None:
        return BUNDLE_SIZE
    prefix_bytes = sum(layer.bytes(longest) for layers in caches.values() for layer in layers)
    return max(BUNDLE_SIZE, min(_LARGEST_BUNDLE, _PREFIX_BYTES // max(1, prefix_bytes)))


def bundle_passes(starts: Sequence[Start | None], size: int = BUNDLE_SIZE) -> list[list[int]]:
    """Group passes (indices), at most ``size``, by where they start; None is the baseline, from which the others go on.
    Passes that save no layers together stay alone.
    """
    groups: list[list[int]] = []
    last_group: list[int] | None = None
    for index, start in enumerate(starts):
        if start == FROM_TOKENS:
            groups.append([index])
        elif last_group is None or len(last_group) == size:
            last_group = [index]
            groups.append(last_group)
        else:
            last_group.append(index)
    bundles: list[list[int]] = []
    for group in groups:
        if _saves_layers([starts[index] for index in group]):
            bundles.append(group)
        else:
            bundles += [[index] for index in group]
    return bundles


def _saves_layers(starts: Sequence[Start | None]) -> bool:
    """Return True if passes that start here take fewer layers in one bundle than apart."""
    skipped = [0.0 if start is None else start.skipped_layers for start in starts]
    # If the group lacks the baseline, the baseline's pass up to the last mask is an extra cost.
    extra = 0 if None in starts else max(skipped)
    return sum(skipped) > extra


@dataclass(frozen=True)
class _Prefixes:
    baseline: Prefix
    arms: tuple[Prefix, ...]


@dataclass(frozen=True)
class _Kept:
    """The baseline's last pass by layer: its inputs (B, N, E), and the outputs (B, N, H, D) of its heads."""

    hidden: dict[int, Tensor]
    heads: dict[int, Tensor]


@dataclass
class _BaselinePass:
    """A pass of the baseline: the record of its ablation, and the KV cache of the pass, kept if it may be stopped."""

    record: InterventionRecord | None
    cache: Cache | None = None


class _Bundle:
    """One pass of the baseline, and a shorter one per mask."""

    def __init__(
        self,
        lm: LoadedModel,
        changes: Sequence[Intervention | None],
        starts: Sequence[Start],
        base: Intervention | None,
    ) -> None:
        self._lm, self._base = lm, base
        self._blocks = find_blocks(lm)
        self._arms = list(zip(changes, starts, strict=True))
        self._starts = {start for mask, start in self._arms if mask != base}

    def read_prefixes(self, tokens: Sequence[Sequence[int]], parents: _Prefixes | None) -> _Prefixes:
        """Read the tokens (R, N) after one parent under the baseline and each mask."""
        parent = None if parents is None else parents.baseline
        baseline: Prefix | None = None
        with self._keeping() as kept, self._baseline() as baseline_pass:
            baseline = read_prefix(self._lm, tokens, parent)
        if baseline is None:  # The pass was stopped; its cache has the keys that the masks share.
            assert baseline_pass.cache is not None
            baseline = Prefix(baseline_pass.cache, len(tokens[0]) + (0 if parent is None else parent.tokens))
        last = len(self._blocks.all) - 1
        prefixes: list[Prefix] = []
        for arm, (mask, start) in enumerate(self._arms):
            # A head changes the keys of higher layers only.
            if mask == self._base or start == Start(last, True):
                prefixes.append(baseline)
                continue
            with self._ablated(mask, start, kept):
                prefix = read_prefix(self._lm, tokens, None if parents is None else parents.arms[arm])
            prefixes.append(prefix.above(start.layer + start.behind_attention, baseline))
        return _Prefixes(baseline, tuple(prefixes))

    def answer(self, inputs: list[DistinctInput], after: Continued[_Prefixes]) -> list[list[InputResult]]:
        """Return the results of each input by arm."""
        prefixes = after.prefixes
        baseline: list[InputResult] | None = None
        with self._keeping() as kept, self._baseline() as baseline_pass:
            after_baseline = Continued(after.start, None if prefixes is None else prefixes.baseline, after.prefix_rows)
            baseline = answer_inputs(self._lm, inputs, after_baseline, baseline_pass.record)
        results_of_arms: list[list[InputResult]] = []
        for arm, (mask, start) in enumerate(self._arms):
            if mask == self._base:
                assert baseline is not None
                results_of_arms.append(baseline)
                continue
            after_mask = Continued(after.start, None if prefixes is None else prefixes.arms[arm], after.prefix_rows)
            with self._ablated(mask, start, kept) as record:
                results_of_arms.append(answer_inputs(self._lm, inputs, after_mask, record))
        return [list(results) for results in zip(*results_of_arms, strict=True)]

    @contextmanager
    def _keeping(self) -> Iterator[_Kept]:
        """Keep what the passes of the masks need of the baseline's pass."""
        behind_attention = {start.layer for start in self._starts if start.behind_attention}
        with (
            self._blocks.keep_inputs({start.layer for start in self._starts}) as hidden,
            self._blocks.keep_heads(behind_attention) as heads,
        ):
            yield _Kept(hidden, heads)

    @contextmanager
    def _baseline(self) -> Iterator[_BaselinePass]:
        """Run the baseline's pass in this context. If no arm needs its result, the context ends when the pass reaches
        the heads of the last layer that a mask needs, and the KV cache is kept.
        """
        with ExitStack() as contexts:
            base = self._base
            record = None if base is None else contexts.enter_context(headscan.intervene(self._lm, base))
            baseline_pass = _BaselinePass(record)
            if any(mask == base for mask, _ in self._arms):
                yield baseline_pass
                return
            last = max(self._starts).layer

            def keep_cache(_: Tensor, cache: Cache | None) -> None:
                baseline_pass.cache = cache

            def stop(site: AttentionSite, _: Tensor) -> None:
                if site.layer >= last:
                    raise _Stopped

            contexts.enter_context(self._blocks.at(last).watched(keep_cache))
            contexts.enter_context(output_hook(self._lm, stop))
            with suppress(_Stopped):
                yield baseline_pass

    @contextmanager
    def _ablated(self, mask: Intervention | None, start: Start, kept: _Kept) -> Iterator[InterventionRecord | None]:
        """Let passes start where those of a mask do, with its heads ablated."""
        with ExitStack() as contexts:
            contexts.enter_context(resuming_at(self._blocks, start.layer, kept.hidden[start.layer]))
            if start.behind_attention:
                contexts.enter_context(self._blocks.with_heads(start.layer, kept.heads[start.layer]))
            yield None if mask is None else contexts.enter_context(headscan.intervene(self._lm, mask))


class _Stopped(Exception):
    """Raised to end a pass of the baseline that has computed all that a bundle needs."""
