"""Answers to labelled examples with heads ablated, on one replica: losses, classes or generated texts.

Shapes: B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from headscan.ablation.intervention import Intervention
from headscan.engine.likelihood import intervening
from headscan.errors import NotFiniteError
from headscan.models.forward_inputs import batch_kwargs
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad, run_halving, whole_batches
from headscan.texts.labelled_texts import Answers, ExampleRequest, labelled_loss
from headscan.texts.token_requests import LogLikelihood, Responses


@torch.no_grad()
def answer_examples(
    lm: LoadedModel, requests: Sequence[ExampleRequest], change: Intervention | None, batch_tokens: int
) -> Responses[LogLikelihood | str]:
    """Answer examples under one change: with log-likelihoods of their targets, or with classes or generated texts."""
    lengths = [request.example.longest for request in requests]
    answers: dict[int, LogLikelihood | str] = {}

    def ask(rows: list[int]) -> Sequence[LogLikelihood | str]:
        batch = [requests[row] for row in rows]
        if batch[0].scored:
            return _losses(lm, batch)
        return _classes(lm, batch) if batch[0].answers is Answers.CLASS else _texts(lm, batch)

    with intervening(lm, change, headscan_kernels=False):
        for batch in whole_batches(lengths, batch_tokens, lm.rope_lengths.group):
            for rows, given in run_halving(list(batch.sequence_indices), ask, lengths, lm.limits["labelled"]):
                answers.update(zip(rows, given, strict=True))
    heads = 0 if change is None else len(change.fixed_heads or ())
    share = heads / sum(lm.grid.at(kind).total_heads for kind in lm.grid.kinds)
    return Responses(tuple(answers[row] for row in range(len(requests))), (share,) * len(requests))


def _losses(lm: LoadedModel, requests: Sequence[ExampleRequest]) -> list[LogLikelihood]:
    losses_B = labelled_loss(lm, requests[0].answers, [request.example for request in requests], summed=True)
    values_B = losses_B.losses(lm).double().cpu()
    _check_finite(values_B)
    # A loss does not show which tokens greedy decoding would choose; the store has NULL.
    return [LogLikelihood(-loss, None) for loss in values_B.tolist()]  # type: ignore[arg-type]


def _classes(lm: LoadedModel, requests: Sequence[ExampleRequest]) -> list[str]:
    loss = labelled_loss(lm, requests[0].answers, [request.example for request in requests])
    logits_BC = lm.model(**loss.inputs).logits.float().cpu()
    _check_finite(logits_BC)
    return [requests[0].classes[number] for number in logits_BC.argmax(-1).tolist()]


class _FiniteLogits(LogitsProcessor):
    """A check of the logits of every generated token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Processors of the model set tokens that it may not write to minus infinity.
        _check_finite(scores.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0))
        return scores


def _texts(lm: LoadedModel, requests: Sequence[ExampleRequest]) -> list[str]:
    model: Any = lm.model
    checks = LogitsProcessorList([_FiniteLogits()])
    ids, lengths = pad([request.example.ids for request in requests])
    inputs = batch_kwargs(ids.to(lm.device), lengths.to(lm.device), causal=False)
    written = model.generate(
        **inputs, do_sample=False, num_beams=1, max_new_tokens=requests[0].new_tokens, logits_processor=checks
    )
    decoded = lm.require_tokenizer().batch_decode(written, skip_special_tokens=True)
    return [text.strip() for text in decoded]


def _check_finite(values: torch.Tensor) -> None:
    if wrong := int((~values.isfinite()).sum()):
        raise NotFiniteError(
            f"NaN or infinite outputs: {wrong} of {values.numel()} (limit 0). Load the model in another `dtype`"
        )
