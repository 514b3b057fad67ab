"""Requests of a task in tokens, and their answers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from headscan.ablation.intervention import Intervention
from headscan.models.loaded_model import LoadedModel


class Request(NamedTuple):
    """Tokens of a context and its continuation. The last ``scored_tokens`` are the continuation."""

    ids: tuple[int, ...]
    scored_tokens: int


class LogLikelihood(NamedTuple):
    """Log-likelihood of a continuation, in nats, and how many of its tokens greedy decoding would choose."""

    log_likelihood: float
    greedy_tokens: int


A = TypeVar("A", covariant=True)


@dataclass(frozen=True)
class Responses(Generic[A]):
    """A log-likelihood or a text for each request, and the ablated share of each request, 0 to 1."""

    values: tuple[A, ...]
    ablated_shares: tuple[float, ...]


Q = TypeVar("Q")


@dataclass(frozen=True)
class ScoringItem(ABC, Generic[Q]):
    """Requests for one replica, and how a model answers them; ``name`` is unique in a job."""

    name: str
    requests: tuple[Q, ...]

    @abstractmethod
    def run(self, lm: LoadedModel) -> Sequence[Responses[Any]]:
        """Answer the requests; one result for each arm of the item."""


@dataclass(frozen=True)
class ArmItem(ScoringItem[Q]):
    """Requests for one replica under one arm, in passes of ``batch_tokens`` tokens."""

    intervention: Intervention | None
    batch_tokens: int


def answer_item(lm: LoadedModel, item: ScoringItem[Any]) -> Sequence[Responses[Any]]:
    """Pool task: answer the requests of an item for each of its arms."""
    return item.run(lm)


class GenerationRequest(NamedTuple):
    """Tokens of a prompt, its stop sequences, and further ``options`` of transformers' ``generate`` as sorted pairs.
    ``draw`` numbers the samples if one prompt is sampled several times.
    """

    ids: tuple[int, ...]
    until: tuple[str, ...]
    max_new_tokens: int
    options: tuple[tuple[str, object], ...]
    draw: int = 0


def request_hash(request: Request | GenerationRequest) -> str:
    """Return 32 hexadecimal digits, equal for equal requests in every process."""
    ids, *rest = request
    digest = hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes())
    digest.update(repr((type(request).__name__, rest)).encode())
    return digest.hexdigest()[:32]


def input_key(ids: Sequence[int]) -> int:
    """Return the key of an input that seeds its random heads and samples, equal for equal tokens."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()[:6], "big")
