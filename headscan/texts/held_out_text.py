"""Ordinary text whose loss every arm is asked for, in addition to tasks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import ModelIdentity, identify
from headscan.settings.corpus_settings import SHORTEST, CorpusSpec, TokenConfig, longest_text
from headscan.store.tables import BITS_PER_BYTE, LOSS
from headscan.texts.corpus import GivenTexts
from headscan.texts.sequences import TokenSequence, read_spread, sequences
from headscan.texts.token_requests import LogLikelihood, Request, request_hash

#: Name of the task in the store.
TEXT_TASK = "text"


@dataclass(frozen=True)
class TextChunk:
    """A sequence of a document, or of one block of a long document; chunks of one ``document`` are judged together. All
    of its two or more tokens but the first are predicted, and ``size`` is the number of their UTF-8 bytes.
    """

    document: str
    ids: tuple[int, ...]
    size: int

    @property
    def request(self) -> Request:
        return Request(self.ids, len(self.ids) - 1)


@dataclass(frozen=True)
class HeldOutText:
    """Chunks that no choice of heads has seen; `of_corpus` reads them from a corpus, and `of_texts` takes them."""

    corpus: str
    chunks: tuple[TextChunk, ...]

    @classmethod
    def of_corpus(
        cls,
        corpus: CorpusSpec,
        model: ModelSpec,
        *,
        sequences: int = 128,
        max_tokens: int | None = None,
        identity: ModelIdentity | None = None,
    ) -> HeldOutText:
        """Read texts for a model, spread over the documents of a corpus.

        Args:
            sequences: Number of texts; all of them if the corpus has fewer.
            max_tokens: Longest text in tokens; None uses the model's context, at most 2,048 tokens.
            identity: Identity of the model; None computes it.

        Raises:
            HeadscanError: The corpus cannot be read, or its texts do not fit the model.
        """
        identity = identity or identify(model)
        tokens, shortest = _lengths(identity, max_tokens)
        found = read_spread(corpus, identity.tokenizer, tokens, sequences, shortest=shortest)
        return cls(corpus.name, chunks(identity.tokenizer, found))

    @classmethod
    def of_texts(
        cls,
        texts: Sequence[str],
        model: ModelSpec,
        *,
        max_tokens: int | None = None,
        identity: ModelIdentity | None = None,
    ) -> HeldOutText:
        """Take whole texts for a model: longer ones are cut into chunks, and texts and rests of fewer than 16 tokens
        are left out.

        Args:
            max_tokens: Longest chunk in tokens; None uses the model's context, at most 2,048 tokens.
            identity: Identity of the model; None computes it.

        Raises:
            HeadscanError: No text has enough tokens, or ``max_tokens`` does not fit the model.
        """
        identity = identity or identify(model)
        tokens, shortest = _lengths(identity, max_tokens)
        corpus = GivenTexts(texts)
        config = TokenConfig(tokens, mode="chunk", min_tokens=shortest)
        return cls(corpus.spec.name, chunks(identity.tokenizer, list(sequences(corpus, identity.tokenizer, config))))

    @property
    def tokens(self) -> int:
        return sum(len(chunk.ids) - 1 for chunk in self.chunks)

    @property
    def requests(self) -> dict[str, Request]:
        return {request_hash(chunk.request): chunk.request for chunk in self.chunks}

    def settings(self) -> dict[str, Any]:
        return {"corpus": self.corpus, "passages": len(self.chunks), "tokens": self.tokens}

    def fingerprint(self) -> str:
        """Return a hash of the documents; the requests have their own."""
        documents = [(chunk.document, chunk.size) for chunk in self.chunks]
        return hashlib.sha256(repr(documents).encode()).hexdigest()

    def answers(self, answers: Mapping[str, LogLikelihood | str]) -> list[dict[str, Any]]:
        """Return the answer rows of an arm, one per chunk, whose metrics are pairs of a sum and its number of tokens or
        bytes, as in lm-eval's perplexities.
        """
        rows = []
        for number, chunk in enumerate(self.chunks):
            likelihood, tokens = likelihood_of(chunk.request, answers), len(chunk.ids) - 1
            pairs = {
                LOSS: (likelihood.log_likelihood, tokens),
                BITS_PER_BYTE: (likelihood.log_likelihood, chunk.size),
                "next_token_accuracy": (likelihood.greedy_tokens, tokens),
            }
            rows.append(
                {
                    "task": TEXT_TASK,
                    "question": number,
                    "doc_hash": hashlib.sha256(chunk.document.encode()).hexdigest(),
                    "recall": False,
                    "log_likelihoods": [likelihood.log_likelihood],
                    "metrics": json.dumps(pairs),
                }
            )
        return rows

    def results(self, answers: Mapping[str, LogLikelihood | str]) -> list[dict[str, Any]]:
        """Return the result rows of an arm: loss, bits per byte and next-token accuracy."""
        likelihoods = [likelihood_of(chunk.request, answers) for chunk in self.chunks]
        nats = -sum(likelihood.log_likelihood for likelihood in likelihoods)
        values = {
            LOSS: nats / self.tokens,
            BITS_PER_BYTE: nats / math.log(2) / sum(chunk.size for chunk in self.chunks),
            "next_token_accuracy": sum(likelihood.greedy_tokens for likelihood in likelihoods) / self.tokens,
        }
        return [
            {
                "task": TEXT_TASK,
                "is_group": False,
                "metric": name,
                "filter": "none",
                "value": value,
                "questions": len(self.chunks),
            }
            for name, value in values.items()
        ]


def _lengths(identity: ModelIdentity, max_tokens: int | None) -> tuple[int, int]:
    """Return the tokens of the longest and of the shortest chunk."""
    tokens = longest_text(identity, max_tokens)
    return tokens, min(SHORTEST, max(2, tokens))  # of one token nothing is predicted


def likelihood_of(request: Request, answers: Mapping[str, LogLikelihood | str]) -> LogLikelihood:
    answer = answers[request_hash(request)]
    assert isinstance(answer, LogLikelihood)
    return answer


def chunks(tokenizer: Any, sequences: Sequence[TokenSequence], *, whole: bool = False) -> tuple[TextChunk, ...]:
    """Return chunks from sequences of two or more tokens. ``whole`` documents are blocks already."""
    pieces = []
    for sequence in sequences:
        ids = tuple(int(token) for token in sequence.ids)
        block = 0 if whole else sequence.block
        document = f"{sequence.source}, block {block + 1}" if block else sequence.source
        text = tokenizer.decode(ids[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pieces.append(TextChunk(document, ids, max(1, len(text.encode("utf-8", "replace")))))
    return tuple(pieces)
