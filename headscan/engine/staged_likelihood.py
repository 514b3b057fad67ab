"""Log-likelihoods of a model that runs by layer ranges.

Every input is read whole, without shared prefixes or KV cache. The last range computes logits; every range counts its
ablated heads.

Shapes: B sequences, L layers of the range, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from headscan.cluster.pool import PassTask
from headscan.engine.likelihood import (
    InputResult,
    LikelihoodItem,
    by_request,
    distinct_inputs,
    intervening,
    likelihoods_at,
)
from headscan.layers.layer_ranges import ablation_here, gives_logits
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import Batch, pad, whole_batches
from headscan.texts.token_requests import LogLikelihood, Responses, input_key

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


class _AnswerInRanges(PassTask[LikelihoodItem, Batch, RangeResult, list[Responses[LogLikelihood]]]):
    """Pool task: answer requests like `LikelihoodItem.run`, range by range of layers."""

    def passes(self, item: LikelihoodItem) -> list[Batch]:
        lengths = [len(one_input.ids) for one_input in distinct_inputs(item.requests)]
        return whole_batches(lengths, item.batch_tokens, item.rope.group, pass_cost=_PASS_COST)

    def run(self, lm: LoadedModel, item: LikelihoodItem, batch: Batch) -> RangeResult:
        all_inputs = distinct_inputs(item.requests)
        inputs = [all_inputs[index] for index in batch.sequence_indices]
        ids, lengths = pad([one_input.ids for one_input in inputs], batch.width)
        input_keys = [input_key(one_input.ids) for one_input in inputs]
        intervention = None if item.intervention is None else ablation_here(lm, item.intervention)
        ablated = (0,) * len(inputs)
        likelihoods = None
        with (
            torch.no_grad(),
            intervening(
                lm, intervention, headscan_kernels=item.headscan_kernels, lengths=lengths, input_keys=input_keys
            ) as record,
        ):
            if gives_logits(lm):
                positions = [
                    (row, position) for row, one_input in enumerate(inputs) for position in one_input.scored_positions
                ]
                likelihoods = tuple(likelihoods_at(lm, inputs, ids, positions, use_cache=False))
            else:
                run_forward(lm.model, {"input_ids": ids.to(lm.device)})
            # `record.ablated` is None if no layer of the range has heads.
            if record is not None and (ablated_BLH := record.ablated) is not None:
                ablated = tuple(ablated_BLH.sum((1, 2)).tolist())
        return RangeResult(likelihoods, ablated, sum(1 for _ in lm.grid.heads()))

    def size(self, batch: Batch) -> int:
        return batch.tokens

    def halves(self, batch: Batch) -> tuple[Batch, ...]:
        return batch.halves()

    def join_halves(self, halves: Sequence[RangeResult]) -> RangeResult:
        scored = [half.likelihoods for half in halves if half.likelihoods is not None]
        ablated = tuple(chain.from_iterable(half.ablated for half in halves))
        return RangeResult(tuple(chain.from_iterable(scored)) if scored else None, ablated, halves[0].heads)

    def join(self, item: LikelihoodItem, partials: Sequence[Sequence[RangeResult]]) -> list[Responses[LogLikelihood]]:
        results: dict[int, InputResult] = {}
        for batch, ranges in zip(self.passes(item), partials, strict=True):
            likelihoods = ranges[-1].likelihoods
            assert likelihoods is not None
            heads = sum(one_range.heads for one_range in ranges)
            ablated = [sum(counts) for counts in zip(*(one_range.ablated for one_range in ranges), strict=True)]
            for index, input_likelihoods, ablated_heads in zip(
                batch.sequence_indices, likelihoods, ablated, strict=True
            ):
                results[index] = InputResult(input_likelihoods, ablated_heads / heads)
        return [by_request(distinct_inputs(item.requests), results)]


answer_in_ranges = _AnswerInRanges()
