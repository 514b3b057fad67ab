"""Requests of a task in tokens, and their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from headscan.models.loaded_model import LoadedModel


class Request(NamedTuple):
    """Tokens of a context and its continuation. The last ``scored`` tokens are the continuation."""

    ids: tuple[int, ...]
    scored: int


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation, in nats, with its greedy tokens. These are the tokens that greedy decoding
    would choose.
    """

    log_likelihood: float
    greedy_tokens: int


class AnswerSet(Protocol):
    """Answers, and the ablated share of each request, 0 to 1."""

    @property
    def answers(self) -> Sequence[Likelihood | str]: ...

    @property
    def zeroed_shares(self) -> Sequence[float]: ...


class ScoringItem(Protocol):
    """Requests for one replica, and how a model answers them."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def run(self, lm: LoadedModel) -> Sequence[AnswerSet]:
        """Answer the requests; one result for each arm of the item."""


class GenerationRequest(NamedTuple):
    """Tokens of a prompt, and the options of generation.

    Attributes:
        until: Stop sequences.
        max_new_tokens: Maximum number of generated tokens.
        options: Further options of transformers' ``generate``, as sorted pairs.
        draw: Number of the sample, if one prompt is sampled several times.
    """

    ids: tuple[int, ...]
    until: tuple[str, ...]
    max_new_tokens: int
    options: tuple[tuple[str, object], ...]
    draw: int = 0


def request_hash(request: Request | GenerationRequest) -> str:
    """Return 32 hexadecimal digits, equal for equal requests. They are the same in every process."""
    ids, *rest = request
    digest = hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes())
    digest.update(repr((type(request).__name__, rest)).encode())
    return digest.hexdigest()[:32]


def input_key(ids: Sequence[int]) -> int:
    """Return the random-heads key of an input, equal for equal tokens."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()[:6], "big")
