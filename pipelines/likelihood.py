"""Log-likelihoods of continuations under a mask or a rule: what a replica does for an evaluation.

Shapes: B sequences, N tokens (padded on the right), P positions whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headscan
from headscan.interventions import HeadMask, HeadRule, InterventionRecord
from headscan.loading import LoadedModel
from pipelines.batching import batches, pad, run_halving


class Request(NamedTuple):
    """Tokens of a context and its continuation, and how many of them are the continuation."""

    ids: tuple[int, ...]
    scored: int


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and how many of its tokens are the likeliest ones at their place."""

    log_likelihood: float
    greedy_tokens: int


@dataclass(frozen=True)
class LikelihoodItem:
    """Requests for one replica."""

    index: int
    requests: tuple[Request, ...]
    silenced: HeadMask | HeadRule | None
    batch_tokens: int

    @property
    def name(self) -> str:
        return f"requests {self.index}"


@dataclass(frozen=True)
class LikelihoodResult:
    """Answers in the order of the requests, and the mean share of heads that were silenced, weighted by requests."""

    answers: tuple[Likelihood, ...]
    zeroed_share: float


def score_requests(lm: LoadedModel, item: LikelihoodItem) -> LikelihoodResult:
    """A pool task: answer requests with heads silenced as the item says."""
    answers: list[Likelihood | None] = [None] * len(item.requests)
    zeroed = 0.0
    with torch.no_grad(), ExitStack() as context:
        record = None
        if item.silenced is not None:
            record = context.enter_context(headscan.intervene(lm, item.silenced))

        def answer(rows: list[int]) -> tuple[list[Likelihood], float]:
            return _answer(lm, [item.requests[row] for row in rows], record)

        for batch in batches([len(request.ids) - 1 for request in item.requests], item.batch_tokens):
            for rows, (likelihoods, share) in run_halving(batch, answer):
                zeroed += share * len(rows)
                for row, likelihood in zip(rows, likelihoods, strict=True):
                    answers[row] = likelihood
    complete = tuple(answer for answer in answers if answer is not None)
    assert len(complete) == len(item.requests)
    return LikelihoodResult(complete, zeroed / max(1, len(complete)))


def _answer(
    lm: LoadedModel, requests: list[Request], record: InterventionRecord | None
) -> tuple[list[Likelihood], float]:
    # The last token of a continuation is predicted, never read.
    ids, lengths = pad([request.ids[:-1] for request in requests])
    if record is not None:
        record.lengths = lengths
    ends = lengths.tolist()
    spans = [range(end - request.scored, end) for end, request in zip(ends, requests, strict=True)]
    logits_BPV, column = _logits_at(lm, ids, sorted({position for span in spans for position in span}))
    likelihoods = []
    for row, (request, span) in enumerate(zip(requests, spans, strict=True)):
        scores = logits_BPV[row, [column[position] for position in span]].float().log_softmax(-1)
        targets = torch.tensor(request.ids[-request.scored :], device=scores.device)
        log_likelihood = scores.gather(-1, targets[:, None]).sum().item()
        likelihoods.append(Likelihood(log_likelihood, int((scores.argmax(-1) == targets).sum())))
    return likelihoods, 0.0 if record is None else record.zeroed_share


def _logits_at(lm: LoadedModel, ids: Tensor, positions: list[int]) -> tuple[Tensor, dict[int, int]]:
    """Logits (B, P, V) at some positions, and the column of each; the output head runs for no others if it can."""
    kwargs: dict[str, Any] = {"use_cache": False}
    # Layers that borrow their keys from others then see the kept tokens alone, where a rule wants whole sequences.
    borrows = getattr(lm.model.config.get_text_config(), "num_kv_shared_layers", 0)
    partial = not borrows and "logits_to_keep" in inspect.signature(lm.model.forward).parameters
    if partial:
        kwargs["logits_to_keep"] = torch.tensor(positions, device=lm.device)
    logits = lm.model(input_ids=ids.to(lm.device), **kwargs).logits
    return logits, {position: i if partial else position for i, position in enumerate(positions)}
