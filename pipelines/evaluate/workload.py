"""Items of work of an evaluation, independent of the arm.

An item is the unit of work of a replica, of storing and of resuming. Requests with a common prefix share an item, so
that the prefix is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headscan.pipelines.scoring.prefixes.prefix_tree import common_tokens
from headscan.pipelines.scoring.token_requests import GenerationRequest, Request

#: Approximate number of items per arm; fewer if items would be smaller than a batch.
_ITEMS = 64


@dataclass(frozen=True)
class WorkItem:
    """Requests to score, or prompts to generate from, and their hashes."""

    index: int
    hashes: tuple[str, ...]
    scored: tuple[Request, ...] = ()
    written: tuple[GenerationRequest, ...] = ()


def work_items(requests: Mapping[str, Request | GenerationRequest], batch_tokens: int) -> list[WorkItem]:
    """Return the items of all requests, given by hash.

    The same requests give the same items.
    """
    items: list[WorkItem] = []
    scored, costs = _by_prefix({h: request for h, request in requests.items() if isinstance(request, Request)})
    for part in _cut(list(scored), costs, batch_tokens):
        items.append(WorkItem(len(items), tuple(part), scored=tuple(scored[h] for h in part)))
    written, costs = _by_length({h: r for h, r in requests.items() if isinstance(r, GenerationRequest)})
    for part in _cut(list(written), costs, batch_tokens):
        items.append(WorkItem(len(items), tuple(part), written=tuple(written[h] for h in part)))
    return items


def _by_prefix(requests: Mapping[str, Request]) -> tuple[dict[str, Request], list[int]]:
    """Return requests sorted by prefix, and each one's new tokens."""
    order = sorted(requests, key=lambda h: (requests[h].ids, requests[h].scored))
    ids = [requests[h].ids for h in order]
    lengths = [len(tokens) for tokens in ids]
    costs = [lengths[i] - common_tokens(ids, lengths, i - 1, i) if i else lengths[i] for i in range(len(ids))]
    return {h: requests[h] for h in order}, costs


def _by_length(requests: Mapping[str, GenerationRequest]) -> tuple[dict[str, GenerationRequest], list[int]]:
    """Return prompts by generation options, and their token counts.

    The longest come first; counts include generated tokens.
    """
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
