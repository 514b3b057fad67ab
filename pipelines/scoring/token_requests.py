"""Requests of a task in tokens, their answers, and padded batches of token sequences.

Shapes: B sequences, N tokens of the longest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headscan.models.model_facts import RopeLengths
from headscan.models.token_batches import batches

if TYPE_CHECKING:
    from headscan.models.loaded_model import LoadedModel


class Request(NamedTuple):
    """Tokens of a context and its continuation. The last ``scored`` tokens are the continuation."""

    ids: tuple[int, ...]
    scored: int


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation, in nats, and how many of its tokens greedy decoding would choose."""

    log_likelihood: float
    greedy_tokens: int


A = TypeVar("A", covariant=True)


@dataclass(frozen=True)
class AnswerSet(Generic[A]):
    """Answers to requests, and the ablated share of each request, 0 to 1."""

    answers: tuple[A, ...]
    zeroed_shares: tuple[float, ...]


class ScoringItem(Protocol):
    """Requests for one replica, and how a model answers them."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def run(self, lm: LoadedModel) -> Sequence[AnswerSet[Likelihood | str]]:
        """Answer the requests; one result for each arm of the item."""


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
    """Return the random-heads key of an input, equal for equal tokens."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()[:6], "big")


#: The one id that every vocabulary has; padding changes no number.
_PADDING = 0

#: Cost of one more forward pass, in tokens: on a GPU a short pass takes as long as one of hundreds of tokens.
_PASS_COST = {"cpu": 64, "cuda": 512}


def pass_cost(device: str) -> int:
    """Return the cost of one more forward pass on a type of device, in tokens."""
    return _PASS_COST.get(device, max(_PASS_COST.values()))


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch, in one or several passes, padded to ``width`` tokens (N). A half keeps the width of the
    whole batch, since its hidden states have it.
    """

    rows: tuple[int, ...]
    width: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.width

    def halves(self) -> tuple[Batch, ...]:
        """Return two smaller batches; none for a single sequence."""
        middle = len(self.rows) // 2
        return (Batch(self.rows[:middle], self.width), Batch(self.rows[middle:], self.width)) if middle else ()


def whole_batches(
    lengths: Sequence[int], batch_tokens: int, rope: RopeLengths, *, pass_cost: float = math.inf
) -> list[Batch]:
    """Return `batches` that keep each sequence's own rotary frequencies."""
    groups = [rope.group(tokens) for tokens in lengths]
    of_rows = batches(lengths, batch_tokens, pass_cost=pass_cost, groups=groups)
    return [Batch(tuple(rows), lengths[rows[0]]) for rows in of_rows]


def pad(sequences: Sequence[Sequence[int] | np.ndarray], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids (B, N), padded on the right to ``width`` (None: to the longest), and lengths (B,)."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.full((len(sequences), width or int(lengths.max())), _PADDING, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
    return ids, lengths
