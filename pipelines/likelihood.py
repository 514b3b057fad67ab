"""Log-likelihoods of continuations with heads silenced: what a replica does for an evaluation.

What several requests begin with is read once; of the rest, logits are made where a continuation is scored and nowhere
else. A rule, and random heads, look at whole inputs: there nothing is shared but what is the same input.

Shapes: B sequences, N tokens (padded on the right), M places whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headscan
from headscan.interventions import HeadMask, InterventionRecord
from headscan.loading import LoadedModel
from headscan.prefixes import Prefix, read_prefix
from pipelines.arms import Silenced
from pipelines.batching import batches, pad, run_halving
from pipelines.logits import logits_at
from pipelines.prefix_tree import PrefixNode, prefix_tree
from pipelines.requests import Likelihood, Request, input_key

#: What one more forward pass costs, in tokens: on a GPU a short pass takes as long as one of hundreds of tokens.
_PASS_COST = {"cpu": 64, "cuda": 512}

#: A batch that goes on from a prefix holds that prefix once a sequence, but in one layer at a time: such tokens take
#: no more than this part of what others take.
_PREFIX_WEIGHT = 4

#: Places whose logits are turned into probabilities at a time, so that no second copy of all of them exists.
_PLACES = 512


@dataclass(frozen=True)
class LikelihoodItem:
    """Requests for one replica.

    Attributes:
        share_prefixes: Read common prefixes once.
    """

    name: str
    requests: tuple[Request, ...]
    silenced: Silenced | None
    batch_tokens: int
    share_prefixes: bool


@dataclass(frozen=True)
class LikelihoodResult:
    """Answers, and the share of heads that were silenced, 0 to 1, in the order of the requests."""

    answers: tuple[Likelihood, ...]
    zeroed_shares: tuple[float, ...]


class _Read(NamedTuple):
    """Tokens that the model reads, and the requests that are answered by it: their index and scored tokens.

    A continuation's last token is predicted, never read, so the answers to a question are often one read.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]

    @property
    def first_place(self) -> int:
        """The first place whose logits are wanted."""
        return len(self.ids) - max(len(target) for _, target in self.requests)


def score_requests(lm: LoadedModel, item: LikelihoodItem) -> LikelihoodResult:
    """A pool task: answer requests with heads silenced as the item says."""
    reads = _reads(item.requests)
    answers: list[Likelihood | None] = [None] * len(item.requests)
    shares = [0.0] * len(item.requests)
    with torch.no_grad(), ExitStack() as context:
        record = None
        if item.silenced is not None:
            record = context.enter_context(headscan.intervene(lm, item.silenced))
        cost = pass_cost(lm)
        for node, prefix in _passes(lm, _tree(item, reads, cost)):
            lengths = [_weight(len(reads[row].ids) - node.end, node.end) for row in node.rows]

            def answer(
                chosen: list[int], node: PrefixNode = node, prefix: Prefix | None = prefix
            ) -> list[tuple[list[Likelihood], float]]:
                return _answer(lm, [reads[node.rows[i]] for i in chosen], node.end, prefix, record)

            for batch in batches(lengths, item.batch_tokens, pass_cost=cost):
                for chosen, found in run_halving(batch, answer):
                    for i, (likelihoods, share) in zip(chosen, found, strict=True):
                        for (request, _), likelihood in zip(reads[node.rows[i]].requests, likelihoods, strict=True):
                            answers[request], shares[request] = likelihood, share
    complete = tuple(answer for answer in answers if answer is not None)
    assert len(complete) == len(item.requests)
    return LikelihoodResult(complete, tuple(shares))


def _reads(requests: Sequence[Request]) -> list[_Read]:
    found: dict[tuple[int, ...], _Read] = {}
    for index, (ids, scored) in enumerate(requests):
        found.setdefault(ids[:-1], _Read(ids[:-1], [])).requests.append((index, ids[-scored:]))
    return list(found.values())


def pass_cost(lm: LoadedModel) -> int:
    """What one more forward pass costs, in tokens."""
    return _PASS_COST.get(lm.device.type, max(_PASS_COST.values()))


def _tree(item: LikelihoodItem, reads: list[_Read], cost: int) -> PrefixNode:
    if not item.share_prefixes or not isinstance(item.silenced, HeadMask | None):
        return PrefixNode(0, (), rows=list(range(len(reads))))
    return prefix_tree([read.ids for read in reads], [read.first_place for read in reads], cost)


def _passes(lm: LoadedModel, root: PrefixNode) -> Iterator[tuple[PrefixNode, Prefix | None]]:
    """Every node with rows, and its prefix; a prefix is kept for as long as something goes on from it."""
    todo: list[tuple[PrefixNode, Prefix | None]] = [(root, None)]
    while todo:
        node, parent = todo.pop()
        prefix = parent
        if node.tokens:
            [(_, prefix)] = run_halving([0], partial(_read, lm, node.tokens, parent))
        if node.rows:
            yield node, prefix
        todo += [(child, prefix) for child in node.children]


def _read(lm: LoadedModel, tokens: Sequence[int], parent: Prefix | None, _: list[int]) -> Prefix:
    return read_prefix(lm, tokens, parent)


def _weight(tokens: int, prefix: int) -> int:
    return max(tokens, -(-(prefix + tokens) // _PREFIX_WEIGHT)) if prefix else tokens


def _answer(
    lm: LoadedModel, reads: list[_Read], start: int, prefix: Prefix | None, record: InterventionRecord | None
) -> list[tuple[list[Likelihood], float]]:
    """Likelihoods of each read's requests, and the share of heads silenced in it, from place ``start`` on."""
    ids, lengths = pad([read.ids[start:] for read in reads])
    if record is not None:
        record.lengths = lengths
        record.keys = [input_key(read.ids) for read in reads]
    rows = [row for row, read in enumerate(reads) for _ in range(read.first_place, len(read.ids))]
    columns = [place - start for read in reads for place in range(read.first_place, len(read.ids))]
    cache: dict[str, Any] = {"use_cache": False}
    if prefix is not None:
        cache = {"use_cache": True, "past_key_values": prefix.continued(len(reads))}
    logits_MV = logits_at(lm, ids, rows, columns, **cache)
    likelihoods = iter(_likelihoods(logits_MV, reads))
    shares = [0.0] * len(reads) if record is None else record.zeroed_shares.tolist()
    return [([next(likelihoods) for _ in read.requests], share) for read, share in zip(reads, shares, strict=True)]


def _likelihoods(logits_MV: Tensor, reads: list[_Read]) -> list[Likelihood]:
    """Likelihoods of all requests of all reads, one after another."""
    places: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    end = 0
    for read in reads:
        end += len(read.ids) - read.first_place
        for _, target in read.requests:
            places += range(end - len(target), end)
            targets += target
            sizes.append(len(target))
    at = torch.tensor(places, device=logits_MV.device)
    target_ids = torch.tensor(targets, device=logits_MV.device)
    parts = [logits.float() for logits in logits_MV.split(_PLACES)]
    norm_M = torch.cat([logits.logsumexp(-1) for logits in parts])
    best_M = torch.cat([logits.argmax(-1) for logits in parts])
    values = (logits_MV[at, target_ids].float() - norm_M[at]).double().split(sizes)
    greedy = (best_M[at] == target_ids).split(sizes)
    return [Likelihood(float(v.sum()), int(g.sum())) for v, g in zip(values, greedy, strict=True)]
