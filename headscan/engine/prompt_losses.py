"""Texts and recall prompts, and their losses under windows of the KV cache; without windows, those of the model.

Losses are forward passes over every prompt, on every pool: on whole models, sets of windows that are alike share the
layers below the first window that differs, and on ranges of layers, all sets pass through a range while it is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from headscan.catalog import RECALL_FAMILIES, recall_family
from headscan.cluster.pool import Pool, Task
from headscan.engine.answer import AnsweringSettings, AnswerItem, answer_item
from headscan.engine.bundles import bundle_passes, latest_start
from headscan.errors import NotFiniteError, SequenceError
from headscan.kv.kv_windows import KvWindows
from headscan.long_work import KnownNumbers, WorkKey, hash_of
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.options import BATCH_TOKENS, SEEDS
from headscan.runs.ledger import measured
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import Progress
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.text_tables import percent
from headscan.texts import CorpusSpec
from headscan.texts.recall_tasks import recall_questions
from headscan.texts.sequences import read_spread
from headscan.texts.token_requests import LogLikelihood, Request, Responses
from headscan.windows import KeptKeys

T = TypeVar("T")

#: Most requests of one item of work.
_REQUESTS = 16

#: Smallest share of answer tokens that the full cache gets right. Below it, a task says nothing about the heads.
_ABLE = 0.1

ALL_KEYS = KeptKeys(())


@dataclass(frozen=True)
class Prompts:
    """Prompts of ``text`` or of a family of recall tasks, named like their corpus, or like the recall task with its
    length. All tokens of ordinary text are scored, but only the answers of recall tasks.
    """

    task: str
    name: str
    requests: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        return sum(len(request.ids) for request in self.requests)

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of a hash of the token ids."""
        ids = b"".join(np.asarray(request.ids, dtype="<i4").tobytes() for request in self.requests)
        return hashlib.sha256(ids).hexdigest()[:16]

    def first_of(self, parts: int) -> Prompts:
        """Return the first of ``parts`` equal parts, of at least two prompts."""
        return replace(self, requests=self.requests[: max(2, len(self.requests) // parts)])

    def halves(self) -> tuple[Prompts, Prompts]:
        """Return the first and the second half, which share no text."""
        middle = len(self.requests) // 2
        return replace(self, requests=self.requests[:middle]), replace(self, requests=self.requests[middle:])


def text_prompts(corpus: CorpusSpec, identity: ModelIdentity, tokens: int, count: int, longer_than: int) -> Prompts:
    """Return up to ``count`` texts of a corpus, drawn from all its files. Texts up to ``longer_than`` tokens, the
    length of the window, show no damage and are left out.
    """
    if tokens <= longer_than:
        raise SequenceError(
            f"`max_tokens={tokens}` (at least {longer_than + 1}, one more than sink and recent). Raise `max_tokens`, "
            "or lower `recent`"
        )
    texts = read_spread(corpus, identity.tokenizer, tokens, count, shortest=longer_than + 1)
    rows = [text.ids.tolist() for text in texts]
    if len(rows) < 2:
        raise SequenceError(
            f"texts of {corpus.name} longer than {longer_than} tokens of sink and recent: {len(rows)} (at least 2). "
            "Choose another corpus, or lower `recent`"
        )
    return Prompts("text", corpus.name, tuple(Request(tuple(ids), len(ids) - 1) for ids in rows))


def recall_prompts(identity: ModelIdentity, tokens: int, count: int, seed: int) -> list[Prompts]:
    """Return the prompts of every family of recall tasks with their right answers: ``count`` of each, a multiple of 4,
    with ``tokens`` tokens including the answer. No evaluation has the same questions.
    """
    plan = RecallQuestions(lengths=(tokens - 1,), questions=count, seed=seed)
    questions = recall_questions(identity.tokenizer, plan, identity.max_tokens, bos="auto", first_seed=SEEDS)
    return [
        Prompts(
            family,
            f"{family}@{tokens - 1}",
            tuple(each.requests[each.answer or 0] for each in questions if recall_family(each.task).name == family),
        )
        for family in RECALL_FAMILIES
    ]


@dataclass(frozen=True)
class PromptPool:
    """A pool that measures prompts, in passes of ``batch_tokens`` tokens. Items that ``known`` has are not measured
    again. ``progress`` counts prompts, once for each set of windows.
    """

    pool: Pool
    batch_tokens: int = BATCH_TOKENS
    rope: RopeLengths = UNVARYING
    known: KnownNumbers = field(default_factory=KnownNumbers)
    progress: Progress | None = None

    def losses(
        self, requests: Sequence[Request], sets: Sequence[KeptKeys], base: KeptKeys = ALL_KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean losses of requests under each set of windows, and the shares of greedy scored tokens, both
        (sets, requests). `ALL_KEYS` is the full cache. A pass goes on from that of ``base`` at the first layer in which
        the windows differ, which changes no number.
        """
        *changes, under = [KvWindows(kept, "windows") if kept.windows else None for kept in (*sets, base)]
        settings = AnsweringSettings(self.batch_tokens, share_prefixes=False, rope=self.rope)
        starts = [None if change == under else latest_start(change, under) for change in changes]
        groups = bundle_passes(starts, 1 if self.pool.staged else settings.bundle_size)
        items: dict[str, tuple[list[int], list[int]]] = {}
        work: list[AnswerItem] = []
        for group in groups:
            for part in self._parts(requests, range(len(requests))):
                name = f"windows {group[0]}, prompts {part[0]} to {part[-1]}"
                items[name] = group, part
                of_group = tuple(changes[index] for index in group)
                work.append(AnswerItem(name, tuple(requests[row] for row in part), of_group, settings, under))

        def key_of(item: AnswerItem) -> WorkKey:
            group, _ = items[item.name]
            windows = [[[layer, head, *kept.key] for layer, head, kept in sets[index].windows] for index in group]
            return "losses under window masks", windows, hash_of(item.requests)

        def numbers(results: Sequence[Responses[LogLikelihood]]) -> list[list[list[float]]]:
            """Return log-likelihoods and numbers of greedy tokens (2, sets, requests)."""
            return [
                [[each.log_likelihood for each in result.values] for result in results],
                [[each.greedy_tokens for each in result.values] for result in results],
            ]

        def count(item: AnswerItem) -> int:
            group, part = items[item.name]
            return len(group) * len(part)

        nats, greedy = np.empty((len(sets), len(requests))), np.empty((len(sets), len(requests)))
        scored = np.array([request.scored_tokens for request in requests])
        for item, losses in self._measured(answer_item, work, key_of, numbers, count):
            group, part = items[item.name]
            at = np.ix_(group, part)
            log_likelihoods, greedy_tokens = losses.reshape(2, len(group), len(part))
            nats[at] = -log_likelihoods / scored[part]
            greedy[at] = greedy_tokens / scored[part]
        if wrong := int((~np.isfinite(nats)).sum()):
            raise NotFiniteError(f"NaN or infinite losses: {wrong} of {nats.size} (limit 0). Use another `dtype`")
        return nats, greedy

    def _parts(self, requests: Sequence[Request], rows: Iterable[int]) -> list[list[int]]:
        """Return the rows in order, in parts of about one pass, each of which a stopped job measures again."""
        parts: list[list[int]] = []
        longest = 0
        for row in rows:
            longest = max(longest, len(requests[row].ids))
            if not parts or len(parts[-1]) == _REQUESTS or (len(parts[-1]) + 1) * longest > self.batch_tokens:
                parts.append([])
                longest = len(requests[row].ids)
            parts[-1].append(row)
        return parts

    def _measured(
        self,
        task: Task[T, Any],
        items: Sequence[T],
        key_of: Callable[[T], WorkKey],
        numbers: Callable[[Any], ArrayLike],
        count: Callable[[Any], int] = lambda item: len(item.requests),
    ) -> Iterator[tuple[T, np.ndarray]]:
        """Yield each item with its numbers, see `measured`; ``count`` returns its prompts for the progress."""
        for item, found, is_new in measured(self.pool, task, items, self.known, key_of, numbers):
            yield item, found
            if self.progress is not None:
                self.progress.count(count(item), is_new=is_new)


def refusal(prompts: Prompts, greedy: np.ndarray) -> str | None:
    """Return why a recall task is left out, from the shares of greedy tokens (1, prompts) with the full cache; None if
    the model can do it.
    """
    right = float(greedy[0].mean())
    if right >= _ABLE:
        return None
    return (
        f"{prompts.name} is left out: the unchanged model gets {percent(round(right, 2))} of the answer tokens"
        f" right (at least {percent(_ABLE)})"
    )
