"""Distinct inputs of requests, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headscan.pipelines.scoring.token_requests import Likelihood, Request


class Read(NamedTuple):
    """An input of the model, and the requests it answers.

    A request has its index and scored tokens.

    The last token of a continuation is predicted, never read, so the choices of a question are often one read.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]

    @property
    def first_place(self) -> int:
        """The first position with a scored logit."""
        return len(self.ids) - max(len(target) for _, target in self.requests)

    @property
    def places(self) -> range:
        """All positions with scored logits."""
        return range(self.first_place, len(self.ids))


class ReadAnswer(NamedTuple):
    """Likelihoods of a read's requests, and its ablated share, 0 to 1."""

    likelihoods: list[Likelihood]
    zeroed_share: float


@dataclass(frozen=True)
class LikelihoodResult:
    """Answers, and the ablated share of each request, 0 to 1."""

    answers: tuple[Likelihood, ...]
    zeroed_shares: tuple[float, ...]


def distinct_reads(requests: Sequence[Request], *, same_context: bool = False) -> list[Read]:
    """Return the distinct inputs of the requests.

    Args:
        same_context: Requests of one read also score equally many tokens, so their contexts are equal.
    """
    found: dict[tuple[tuple[int, ...], int], Read] = {}
    for index, (ids, scored) in enumerate(requests):
        key = (ids[:-1], scored if same_context else 0)
        found.setdefault(key, Read(ids[:-1], [])).requests.append((index, ids[-scored:]))
    return list(found.values())


def by_request(reads: Sequence[Read], found: Mapping[int, ReadAnswer]) -> LikelihoodResult:
    """Return answers in the order of the requests.

    They come from the answers of the reads by index.
    """
    answers: dict[int, Likelihood] = {}
    shares: dict[int, float] = {}
    for index, read in enumerate(reads):
        for (request, _), likelihood in zip(read.requests, found[index].likelihoods, strict=True):
            answers[request], shares[request] = likelihood, found[index].zeroed_share
    order = range(len(answers))
    return LikelihoodResult(tuple(answers[i] for i in order), tuple(shares[i] for i in order))
