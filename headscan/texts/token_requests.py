"""Requests of a task in tokens, and their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np


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
    """A log-likelihood or a text for each request, and the ablated share of each request, 0 to 1. A ``note`` is the
    reason for which the model read prompts in a slower way.
    """

    values: tuple[A, ...]
    ablated_shares: tuple[float, ...]
    note: str = field(default="", compare=False)


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
