"""The one call that answers requests, `answer`, and the pool task that makes it.

A replica chooses the way from the requests, the changes, the settings of the run, and what its model can do. The first
row that holds decides:

====================================================================  =========================  =======================
if                                                                    function                   module
====================================================================  =========================  =======================
the requests are labelled examples                                    `answer_examples`          `examples`
the model continues prompts: a `GenerationRequest`                    `generated_texts`          `generation`
``change.evicts``: a plan in mode ``decode``                          `evicted_likelihoods`      `eviction`
several changes (masks and baseline) whose passes share layers        `bundled_likelihoods`      `bundles`
a rule, or any arm with ``headscan_kernels``, if prompts share rows   `shared_row_likelihoods`   `shared_row_likelihood`
otherwise: masks, baseline, rules whose prompts share no rows         `likelihoods`              `likelihood`
====================================================================  =========================  =======================

On ranges of layers every input is read whole, without shared prefixes or KV cache. The last range computes logits;
every range counts its ablated heads.

Shapes: B sequences, L layers of the range, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from headscan.ablation.intervention import Ablation, Intervention
from headscan.cluster.pool import PassTask
from headscan.engine.bundles import (
    BUNDLE_SIZE,
    FROM_TOKENS,
    bundle_passes,
    bundled_likelihoods,
    possible_starts,
    start_of,
)
from headscan.engine.eviction import evicted_likelihoods
from headscan.engine.likelihood import (
    InputResult,
    by_request,
    distinct_inputs,
    intervening,
    likelihoods,
    likelihoods_at,
)
from headscan.engine.shared_row_likelihood import shared_row_likelihoods
from headscan.layers.layer_ranges import ablation_here, gives_logits
from headscan.layers.prefix_cache import shares_prefixes
from headscan.layers.shared_rows import can_share_rows
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import Batch, pad, whole_batches
from headscan.texts.labelled_texts import ExampleRequest
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, Responses, input_key

#: Dtypes in which the order of summation changes answers.
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class AnsweringSettings:
    """How all arms of a run are answered, so that their answers stay comparable.

    Attributes:
        batch_tokens: Tokens of one pass, such as 8,192.
        share_prefixes: False reads prompts whole; True reads common prefixes once if the model can; None does so only
            if all arms can then also use the same kernels.
        headscan_kernels: All arms use headscan's attention kernels.
        rope: Sequence lengths at which the model's rotary frequencies change; only models in ranges of layers need it.
        bundle_size: Most masks, such as 8, that share what runs before their first head; 1 answers each arm alone.
    """

    batch_tokens: int
    share_prefixes: bool | None = None
    headscan_kernels: bool = False
    rope: RopeLengths = UNVARYING
    bundle_size: int = BUNDLE_SIZE


@dataclass(frozen=True)
class AnswerItem:
    """Requests of one kind for one replica, and the changes (None is the whole model) under which each is answered;
    ``name`` is unique in a job. See `answer`.
    """

    name: str
    requests: tuple[Any, ...]
    changes: tuple[Intervention | None, ...]
    settings: AnsweringSettings
    base: Intervention | None = None


def need_headscan_kernels(dtype: str, changes: Sequence[Intervention | None]) -> bool:
    """Return True if all arms need headscan's attention kernels, because one of them does, such as a rule, a random
    rule or a window mask: in half precision kernels round differently, which would add to every difference to the
    baseline.
    """
    return dtype in HALF and any(change is not None and change.uses_headscan_kernels for change in changes)


def need_whole_inputs(dtype: str, changes: Sequence[Intervention | None]) -> bool:
    """Return True if all arms need whole inputs, because one of them resamples heads: kernels round differently in
    half precision.
    """
    return dtype in HALF and any(
        isinstance(change, Ablation) and not change.replacement.position_free for change in changes
    )


def settings_for(
    changes: Sequence[Intervention | None],
    batch_tokens: int,
    share_prefixes: bool | None,
    *,
    dtype: str,
    rope: RopeLengths,
    say: Callable[[str], None],
) -> AnsweringSettings:
    """Return the settings under which these changes of a model with ``dtype`` and ``rope`` are comparable. ``say``
    receives the reason if a change decides that prompts are read whole.
    """
    kernels = need_headscan_kernels(dtype, changes)
    if share_prefixes is None and need_whole_inputs(dtype, changes):
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and resampled heads need whole inputs")
        share_prefixes = False
    # Passes in headscan's attention kernels start from token ids, never from a layer of the baseline's pass.
    return AnsweringSettings(batch_tokens, share_prefixes, kernels, rope, 1 if kernels else BUNDLE_SIZE)


def answer(
    lm: LoadedModel,
    requests: Sequence[Any],
    changes: Sequence[Intervention | None],
    settings: AnsweringSettings,
    base: Intervention | None = None,
) -> list[Responses[Any]]:
    """Answer requests of one kind under each change, in the fastest way of this model that keeps the arms of a run
    comparable. Passes under several changes go on from one pass under ``base``, which changes no number.
    """
    if not isinstance(requests[0], Request) or settings.headscan_kernels or len(changes) == 1:
        return [_answer_alone(lm, requests, change, settings) for change in changes]
    possible = possible_starts(lm, changes)
    starts = [None if change == base else start_of(change, possible, base) for change in changes]
    responses: dict[int, Responses[Any]] = {}
    for bundle in bundle_passes(starts, len(changes)):
        bundled = [changes[index] for index in bundle]
        if len(bundle) == 1:
            found = [_answer_alone(lm, requests, bundled[0], settings)]
        else:
            share, _, note = _prefixes(lm, settings)
            of_bundle = [starts[index] or FROM_TOKENS for index in bundle]
            found = bundled_likelihoods(lm, requests, bundled, of_bundle, settings.batch_tokens, share, base)
            found = [replace(each, note=note) for each in found]
        responses.update(zip(bundle, found, strict=True))
    return [responses[index] for index in range(len(changes))]


def _answer_alone(
    lm: LoadedModel, requests: Sequence[Any], change: Intervention | None, settings: AnsweringSettings
) -> Responses[Any]:
    tokens, kernels = settings.batch_tokens, settings.headscan_kernels
    if isinstance(requests[0], ExampleRequest):
        from headscan.engine.examples import answer_examples

        return answer_examples(lm, requests, change, tokens)
    if isinstance(requests[0], GenerationRequest):
        # Generation needs lm-eval, which benchmarks of scoring do without.
        from headscan.engine.generation import generated_texts

        return generated_texts(lm, requests, change, tokens, one_by_one=kernels)
    if change is not None and change.evicts:
        return evicted_likelihoods(lm, requests, change, tokens)
    needs_whole_input = change is not None and change.needs_whole_input
    if (
        settings.share_prefixes is not False
        and (kernels or needs_whole_input)
        and _known(lm, "inputs share rows", can_share_rows)
    ):
        return shared_row_likelihoods(lm, requests, change, tokens)
    share, kernels, note = _prefixes(lm, settings)
    return replace(likelihoods(lm, requests, change, tokens, share, kernels), note=note)


def _prefixes(lm: LoadedModel, settings: AnsweringSettings) -> tuple[bool, bool, str]:
    """Return whether prompts continue from cached prefixes, whether all arms use headscan's attention kernels, and the
    reason if the model cannot share prefixes.
    """
    kernels = settings.headscan_kernels
    if settings.share_prefixes is False:
        return False, kernels, ""
    if kernels and settings.share_prefixes is None:
        reason = f"in {lm.dtype} all arms need the same kernels, and this model cannot share rows"
    elif not _known(lm, "prefixes can be continued", shares_prefixes):
        reason = "continuing from a cached prefix changes the hidden states of this model"
    else:
        return True, False, ""
    return False, kernels, f"prompts are read whole: {reason}"


def _known(lm: LoadedModel, what: str, check: Callable[[LoadedModel], bool]) -> bool:
    """Return what short passes show of a model, which run once."""
    key = (what, lm.dtype)
    if key not in lm.checks:
        lm.checks[key] = check(lm)
    return lm.checks[key]


#: Cost of one more forward pass, in tokens. One for all devices, because every process must cut the same batches.
_PASS_COST = 64


@dataclass(frozen=True)
class RangeResult:
    """Result of one range of layers for a batch of inputs: log-likelihoods (None before the last range), the number of
    heads ``ablated`` in each input (B,), and the number of ``heads`` of the range.
    """

    likelihoods: tuple[list[LogLikelihood], ...] | None
    ablated: tuple[int, ...]
    heads: int


class AnswerTask(PassTask[AnswerItem, Batch, RangeResult, list[Responses[Any]]]):
    """Pool task: answer the requests of an item. On ranges of layers, an item has scored requests and one change."""

    def __call__(
        self, lm: LoadedModel, item: AnswerItem, *, on_pass: Callable[[int], None] | None = None
    ) -> list[Responses[Any]]:
        return answer(lm, item.requests, item.changes, item.settings, item.base)

    def passes(self, item: AnswerItem) -> list[Batch]:
        settings = item.settings
        lengths = [len(one_input.ids) for one_input in distinct_inputs(item.requests)]
        return whole_batches(lengths, settings.batch_tokens, settings.rope.group, pass_cost=_PASS_COST)

    def run(self, lm: LoadedModel, item: AnswerItem, batch: Batch) -> RangeResult:
        [change] = item.changes
        all_inputs = distinct_inputs(item.requests)
        inputs = [all_inputs[index] for index in batch.sequence_indices]
        ids, lengths = pad([one_input.ids for one_input in inputs], batch.width)
        input_keys = [input_key(one_input.ids) for one_input in inputs]
        change_here = None if change is None else ablation_here(lm, change)
        kernels = item.settings.headscan_kernels
        ablated = (0,) * len(inputs)
        likelihoods_of_inputs = None
        with (
            torch.no_grad(),
            intervening(lm, change_here, headscan_kernels=kernels, lengths=lengths, input_keys=input_keys) as record,
        ):
            if gives_logits(lm):
                positions = [
                    (row, position) for row, one_input in enumerate(inputs) for position in one_input.scored_positions
                ]
                likelihoods_of_inputs = tuple(likelihoods_at(lm, inputs, ids, positions, use_cache=False))
            else:
                run_forward(lm.model, {"input_ids": ids.to(lm.device)})
            # `record.ablated` is None if no layer of the range has heads.
            if record is not None and (ablated_BLH := record.ablated) is not None:
                ablated = tuple(ablated_BLH.sum((1, 2)).tolist())
        return RangeResult(likelihoods_of_inputs, ablated, sum(1 for _ in lm.grid.heads()))

    def size(self, batch: Batch) -> int:
        return batch.tokens

    def halves(self, batch: Batch) -> tuple[Batch, ...]:
        return batch.halves()

    def join_halves(self, halves: Sequence[RangeResult]) -> RangeResult:
        scored = [half.likelihoods for half in halves if half.likelihoods is not None]
        ablated = tuple(chain.from_iterable(half.ablated for half in halves))
        return RangeResult(tuple(chain.from_iterable(scored)) if scored else None, ablated, halves[0].heads)

    def join(self, item: AnswerItem, partials: Sequence[Sequence[RangeResult]]) -> list[Responses[Any]]:
        results: dict[int, InputResult] = {}
        for batch, ranges in zip(self.passes(item), partials, strict=True):
            likelihoods_of_inputs = ranges[-1].likelihoods
            assert likelihoods_of_inputs is not None
            heads = sum(one_range.heads for one_range in ranges)
            ablated = [sum(counts) for counts in zip(*(one_range.ablated for one_range in ranges), strict=True)]
            for index, input_likelihoods, ablated_heads in zip(
                batch.sequence_indices, likelihoods_of_inputs, ablated, strict=True
            ):
                results[index] = InputResult(input_likelihoods, ablated_heads / heads)
        return [by_request(distinct_inputs(item.requests), results)]


answer_item = AnswerTask()
