"""Log-likelihoods of continuations with heads ablated, on one replica.

A common prefix of several requests is read once, and logits are computed only at scored tokens. Rules and random heads
need whole inputs, so they share equal inputs only; `shared_row_likelihood` shares prefixes for rules.

Shapes: B sequences, N tokens (padded on the right), M scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headscan
from headscan.ablation.ablation import Ablation, InterventionRecord
from headscan.attention.hooks import attention_hook
from headscan.layers.shared_prefixes import Prefix, read_prefix
from headscan.models.loaded_model import LoadedModel, logits_at
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.pipelines.scoring.batching import pad
from headscan.pipelines.scoring.prefix_walk import (
    Continued,
    LikelihoodResult,
    Read,
    ReadAnswer,
    by_request,
    distinct_reads,
    walk,
)
from headscan.pipelines.scoring.token_requests import Likelihood, Request, input_key

#: Positions normalised at a time, so that no second copy of all logits exists.
_PLACES = 512


@dataclass(frozen=True)
class LikelihoodItem:
    """Requests for one replica.

    Attributes:
        share_prefixes: Read common prefixes once.
        as_rules: Compute attention with the kernels of rules; not together with ``share_prefixes``.
        rope: The sequence lengths at which the model's rotary frequencies change; batches never mix them.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation | None
    batch_tokens: int
    share_prefixes: bool
    as_rules: bool = False
    rope: RopeLengths = UNVARYING

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return [score_requests(lm, self)]


def score_requests(lm: LoadedModel, item: LikelihoodItem) -> LikelihoodResult:
    """Pool task: answer requests with the item's heads ablated."""
    reads = distinct_reads(item.requests)
    share = item.share_prefixes and (item.ablated is None or item.ablated.may_share_prefix)
    answers = answers_to(lm, reads, item.ablated, item.batch_tokens, share_prefixes=share, as_rules=item.as_rules)
    return by_request(reads, answers)


@contextmanager
def ablating(
    lm: LoadedModel, ablated: Ablation | None, *, as_rules: bool, **about: Any
) -> Iterator[InterventionRecord | None]:
    """Ablate heads while the context is open. It yields None if ``ablated`` is None.

    Args:
        as_rules: Use the kernels of rules for every arm: in half precision, kernels round differently.
        about: Arguments of `headscan.intervene`.
    """
    with ExitStack() as context:
        if as_rules and (ablated is None or not ablated.needs_whole_input):
            context.enter_context(attention_hook(lm, lambda site, call: call.output()))
        yield None if ablated is None else context.enter_context(headscan.intervene(lm, ablated, **about))


def answers_to(
    lm: LoadedModel,
    reads: Sequence[Read],
    ablated: Ablation | None,
    batch_tokens: int,
    *,
    share_prefixes: bool = False,
    as_rules: bool = False,
) -> dict[int, ReadAnswer]:
    """Return the answers of all reads by index; ``share_prefixes`` requires `Ablation.may_share_prefix`."""
    with torch.no_grad(), ExitStack() as context:
        record = context.enter_context(ablating(lm, ablated, as_rules=as_rules))

        def answer(chosen: list[Read], after: Continued[Prefix]) -> list[ReadAnswer]:
            return answer_reads(lm, chosen, after, record)

        return dict(walk(lm, reads, batch_tokens, share_prefixes, partial(read_prefix, lm), answer))


def answer_reads(
    lm: LoadedModel, reads: Sequence[Read], after: Continued[Prefix], record: InterventionRecord | None
) -> list[ReadAnswer]:
    """Answer a batch of reads from their prefixes on."""
    ids, lengths = pad([read.ids[after.start :] for read in reads])
    if record is not None:
        record.lengths = lengths
        record.keys = [input_key(read.ids) for read in reads]
    places = [(row, place - after.start) for row, read in enumerate(reads) for place in read.places]
    cache: dict[str, Any] = {"use_cache": False}
    if after.prefix is not None:
        cache = {"use_cache": True, "past_key_values": after.prefix.continued(after.rows)}
    likelihoods = likelihoods_at(lm, reads, ids, places, **cache)
    shares = [0.0] * len(reads) if record is None else record.zeroed_shares.tolist()
    return [ReadAnswer(of_read, share) for of_read, share in zip(likelihoods, shares, strict=True)]


def likelihoods_at(
    lm: LoadedModel, reads: Sequence[Read], ids: Tensor, places: Sequence[tuple[int, int]], **kwargs: Any
) -> list[list[Likelihood]]:
    """Return likelihoods by read from one pass over ids (B, N).

    ``places`` are the (row, column) of `Read.places`.
    """
    rows, columns = ([place[axis] for place in places] for axis in (0, 1))
    likelihoods = iter(_likelihoods(logits_at(lm, ids, rows, columns, **kwargs), reads))
    return [[next(likelihoods) for _ in read.requests] for read in reads]


def _likelihoods(logits_MV: Tensor, reads: Sequence[Read]) -> list[Likelihood]:
    """Return the likelihoods of all requests of all reads, in order."""
    places: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    end = requests = 0
    for read in reads:
        end += len(read.ids) - read.first_place
        for _, target in read.requests:
            places += range(end - len(target), end)
            targets += target
            owners += [requests] * len(target)
            requests += 1
    at = torch.tensor(places, device=logits_MV.device)
    target_ids = torch.tensor(targets, device=logits_MV.device)
    values = torch.empty(len(at), device=logits_MV.device)
    greedy = torch.empty(len(at), dtype=torch.bool, device=logits_MV.device)
    for start, logits in zip(range(0, len(logits_MV), _PLACES), logits_MV.split(_PLACES), strict=True):
        here = ((at >= start) & (at < start + _PLACES)).nonzero()[:, 0]
        rows, ids = at[here] - start, target_ids[here]
        values[here] = logits.float().log_softmax(-1)[rows, ids]
        greedy[here] = _greedy(logits, rows, ids)
    sums = torch.zeros(requests, dtype=torch.float64).index_add_(
        0, owner := torch.tensor(owners), values.cpu().double()
    )
    counts = torch.zeros(requests, dtype=torch.long).index_add_(0, owner, greedy.cpu().long())
    return [Likelihood(*each) for each in zip(sums.tolist(), counts.tolist(), strict=True)]


def _greedy(logits_MV: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return whether each id is the first one with the largest logit of its row."""
    greedy = logits_MV[rows, ids] == logits_MV.amax(-1)[rows]
    # On a CPU, argmax takes 20 times as long as the maximum: it decides only between equal logits.
    largest = greedy.nonzero()[:, 0]
    greedy[largest] = logits_MV[rows[largest]].float().argmax(-1) == ids[largest]
    return greedy
