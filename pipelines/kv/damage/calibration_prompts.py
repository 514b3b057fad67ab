"""Texts and recall prompts on which the damage of windows is measured.

One half ranks the KV heads, and the other half is held out: the loss of a plan is measured on it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headscan.errors import SequenceError
from headscan.pipelines.corpora import CorpusSpec, TokenPlan, open_corpus, sequences
from headscan.pipelines.recall import RecallPlan, recall_questions
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.scoring.token_requests import Request

#: Sequences read from a corpus for each one that is used: the used ones are spread evenly over them.
_SPREAD = 16

#: Evaluations draw recall questions with seeds below this one. Seeds from here on give other questions, so no plan is
#: evaluated on the questions that ranked its heads.
_FIRST_SEED = 2**32

PromptTask = Literal["text", "needle", "copying"]


@dataclass(frozen=True)
class Prompts:
    """Prompts of one task.

    Attributes:
        task: Ordinary text, all tokens scored; or a recall task, answers scored.
        name: Name of the corpus, or of the recall task with its length.
        requests: Token ids, and the number of scored tokens.
    """

    task: PromptTask
    name: str
    requests: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.ids) for request in self.requests)

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of a hash of the token ids."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(np.asarray(request.ids, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]

    def halves(self) -> tuple[Prompts, Prompts]:
        """Return the first and the second half, which share no text."""
        middle = len(self.requests) // 2
        return replace(self, requests=self.requests[:middle]), replace(self, requests=self.requests[middle:])


def text_prompts(corpus: CorpusSpec, identity: ModelIdentity, tokens: int, count: int, longer_than: int) -> Prompts:
    """Return texts of a corpus, spread over its beginning.

    Args:
        tokens: Longest text, in tokens.
        count: Number of texts; fewer if the corpus has fewer.
        longer_than: Tokens of the window; shorter texts show no damage and are left out.

    Raises:
        SequenceError: Fewer than two texts are longer than the window.
        CorpusError: The corpus cannot be read.
    """
    if tokens <= longer_than:
        raise SequenceError(
            f"max_tokens={tokens} (at least {longer_than + 1}, one more than sink and recent). Raise `max_tokens`, or "
            "lower `recent`"
        )
    plan = TokenPlan(tokens, mode="chunk", min_tokens=longer_than + 1, limit_sequences=count * _SPREAD)
    found = [each.ids.tolist() for each in sequences(open_corpus(corpus), identity.tokenizer, plan)]
    if len(found) < 2:
        raise SequenceError(
            f"texts of {corpus.name} longer than {longer_than} tokens of sink and recent: {len(found)} (at least 2). "
            "Choose another corpus, or lower `recent`"
        )
    count = min(count, len(found))
    chosen = [found[i * len(found) // count] for i in range(count)]
    return Prompts("text", corpus.name, tuple(Request(tuple(ids), len(ids) - 1) for ids in chosen))


def recall_prompts(identity: ModelIdentity, tokens: int, count: int, seed: int) -> list[Prompts]:
    """Return needle and copying prompts with their right answers.

    Args:
        tokens: Tokens of a prompt with its answer.
        count: Prompts of each kind, a multiple of 8.
        seed: Seed of the prompts; no evaluation has the same questions.

    Raises:
        RecallError: The tokenizer or the length does not allow them.
    """
    plan = RecallPlan(lengths=(tokens - 1,), questions=count, seed=_FIRST_SEED + seed)
    questions = recall_questions(identity.tokenizer, plan, identity.max_tokens, bos="auto")
    kinds: tuple[PromptTask, ...] = ("needle", "copying")
    return [
        Prompts(
            kind,
            f"{kind}@{tokens - 1}",
            tuple(each.requests[each.answer or 0] for each in questions if each.task.startswith(kind)),
        )
        for kind in kinds
    ]
