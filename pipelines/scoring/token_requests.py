"""What a task asks of a model, in tokens, and what the model answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """Tokens of a context and its continuation, and how many of them are the continuation."""

    ids: tuple[int, ...]
    scored: int


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and how many of its tokens are the likeliest ones at their place."""

    log_likelihood: float
    greedy_tokens: int


class GenerationRequest(NamedTuple):
    """Tokens of a prompt, and how the text after it is made.

    Attributes:
        until: Texts at which it ends.
        max_new_tokens: The most tokens it may have.
        options: Further options of transformers' ``generate``, as sorted pairs.
        draw: Which of several samples of the same prompt this is.
    """

    ids: tuple[int, ...]
    until: tuple[str, ...]
    max_new_tokens: int
    options: tuple[tuple[str, object], ...]
    draw: int = 0


def request_hash(request: Request | GenerationRequest) -> str:
    """32 hexadecimal digits that are the same for the same request, in every process."""
    ids, *rest = request
    digest = hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes())
    digest.update(repr((type(request).__name__, rest)).encode())
    return digest.hexdigest()[:32]


def input_key(ids: Sequence[int]) -> int:
    """A number that is the same for the same tokens: random heads are drawn by it."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()[:6], "big")
