"""The requests of an evaluation, cut into items: the same for every arm, and whatever the number of replicas.

An item is what a replica works on, and what is stored and resumed as one. Requests that begin alike lie in one item, so
that their common prefix is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headscan.pipelines.scoring.prefix_tree import common_tokens
from headscan.pipelines.scoring.token_requests import GenerationRequest, Request

#: An arm's requests are cut into about so many items, unless that makes them smaller than a batch.
_ITEMS = 64


@dataclass(frozen=True)
class WorkItem:
    """Requests of one kind, to be scored or to be written, and their hashes."""

    index: int
    hashes: tuple[str, ...]
    scored: tuple[Request, ...] = ()
    written: tuple[GenerationRequest, ...] = ()


def work_items(requests: Mapping[str, Request | GenerationRequest], batch_tokens: int) -> list[WorkItem]:
    """Items of all requests, by their hashes; the same requests give the same items."""
    items: list[WorkItem] = []
    scored, costs = _by_prefix({h: request for h, request in requests.items() if isinstance(request, Request)})
    for part in _cut(list(scored), costs, batch_tokens):
        items.append(WorkItem(len(items), tuple(part), scored=tuple(scored[h] for h in part)))
    written, costs = _by_length({h: r for h, r in requests.items() if isinstance(r, GenerationRequest)})
    for part in _cut(list(written), costs, batch_tokens):
        items.append(WorkItem(len(items), tuple(part), written=tuple(written[h] for h in part)))
    return items


def _by_prefix(requests: Mapping[str, Request]) -> tuple[dict[str, Request], list[int]]:
    """Requests with common beginnings beside each other, and the tokens that each adds to the one before it."""
    order = sorted(requests, key=lambda h: (requests[h].ids, requests[h].scored))
    ids = [requests[h].ids for h in order]
    lengths = [len(tokens) for tokens in ids]
    costs = [lengths[i] - common_tokens(ids, lengths, i - 1, i) if i else lengths[i] for i in range(len(ids))]
    return {h: requests[h] for h in order}, costs


def _by_length(requests: Mapping[str, GenerationRequest]) -> tuple[dict[str, GenerationRequest], list[int]]:
    """Prompts of one way of generating beside each other, longest first, and their tokens with those to come."""
    order = sorted(requests, key=lambda h: (repr(requests[h][1:-1]), -len(requests[h].ids), h))
    return {h: requests[h] for h in order}, [len(requests[h].ids) + requests[h].max_new_tokens for h in order]


def _cut(hashes: Sequence[str], costs: Sequence[int], batch_tokens: int) -> list[Sequence[str]]:
    size = max(batch_tokens, sum(costs) // _ITEMS)
    starts, tokens = [0], 0
    for index, cost in enumerate(costs):
        if tokens and tokens + cost > size:
            starts.append(index)
            tokens = 0
        tokens += cost
    return [hashes[a:b] for a, b in pairwise([*starts, len(hashes)]) if b > a]
