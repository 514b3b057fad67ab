"""Answering of requests: arms run on replicas, answers are stored as they arrive, and stopped runs resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscan.cluster.pool import Finished, Pool
from headscan.engine.answer import AnsweringSettings, AnswerItem, answer_item
from headscan.engine.arms import Arm
from headscan.engine.bundles import BUNDLE_SIZE, bundle_passes, latest_start
from headscan.long_work import WorkKey, hash_of
from headscan.runs.ledger import Ledger
from headscan.runs.progress import Progress
from headscan.texts.labelled_texts import ExampleRequest
from headscan.texts.prefix_tree import common_tokens
from headscan.texts.tasks import AnyRequest
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, Responses

#: Approximate number of chunks per arm; fewer if chunks would be smaller than a batch.
_CHUNKS_PER_ARM = 64
#: Labelled examples of one chunk.
_CHUNK_EXAMPLES = 512


@dataclass(frozen=True)
class RequestChunk:
    """Requests of one kind and their hashes."""

    index: int
    hashes: tuple[str, ...]
    requests: tuple[Any, ...]

    @cached_property
    def _hash(self) -> str:
        return hash_of(self.hashes)

    def key(self, arm_id: str) -> WorkKey:
        """Return the key of an arm's answers in the ledger."""
        return "answers of an arm", arm_id, self._hash

    @property
    def can_bundle(self) -> bool:
        """True if one item can answer it for several masks."""
        return isinstance(self.requests[0], Request)


def request_chunks(requests: Mapping[str, AnyRequest], batch_tokens: int) -> list[RequestChunk]:
    """Return the chunks of all requests, given by hash. The same requests give the same chunks."""
    scored = {key: request for key, request in requests.items() if isinstance(request, Request)}
    prompts = {key: request for key, request in requests.items() if isinstance(request, GenerationRequest)}
    examples = [key for key, request in requests.items() if isinstance(request, ExampleRequest)]
    hashes_of_chunks = [
        *_cut(*_by_prefix(scored), batch_tokens),
        *_cut(*_by_length(prompts), batch_tokens),
        *_cut(examples, [1] * len(examples), _CHUNK_EXAMPLES),
    ]
    return [
        RequestChunk(index, tuple(hashes), tuple(requests[key] for key in hashes))
        for index, hashes in enumerate(hashes_of_chunks)
    ]


def _by_prefix(requests: Mapping[str, Request]) -> tuple[list[str], list[int]]:
    """Return the hashes of requests sorted by prefix, and each one's new tokens."""
    hashes = sorted(requests, key=lambda key: (requests[key].ids, requests[key].scored_tokens))
    ids = [requests[key].ids for key in hashes]
    lengths = [len(tokens) for tokens in ids]
    costs = [lengths[i] - common_tokens(ids, lengths, i - 1, i) if i else lengths[i] for i in range(len(ids))]
    return hashes, costs


def _by_length(requests: Mapping[str, GenerationRequest]) -> tuple[list[str], list[int]]:
    """Return the hashes of prompts by generation options, the longest first, and their tokens with generated ones."""
    options = {key: repr((request.until, request.max_new_tokens, request.options)) for key, request in requests.items()}
    hashes = sorted(requests, key=lambda key: (options[key], -len(requests[key].ids), key))
    return hashes, [len(requests[key].ids) + requests[key].max_new_tokens for key in hashes]


def _cut(hashes: Sequence[str], costs: Sequence[int], batch_tokens: int) -> list[Sequence[str]]:
    """Return the hashes of each chunk, in order: of one batch of tokens, or of a part of all (`_CHUNKS_PER_ARM`) if
    that is more.
    """
    most_tokens = max(batch_tokens, sum(costs) // _CHUNKS_PER_ARM)
    starts, tokens = [0], 0
    for index, cost in enumerate(costs):
        if tokens and tokens + cost > most_tokens:
            starts.append(index)
            tokens = 0
        tokens += cost
    return [hashes[a:b] for a, b in pairwise([*starts, len(hashes)]) if b > a]


#: Seconds that a bundle of more than `BUNDLE_SIZE` arms should take: progress is printed, and answers are stored, when
#: one ends.
_BUNDLE_SECONDS = 20.0
#: Responses of an arm by the hash of the request, each with the share of heads that it ablated, 0 to 1.
ArmResponses = dict[str, tuple[LogLikelihood | str, float]]


def answer_arms(
    ledger: Ledger,
    pool: Pool,
    arms: Mapping[str, Arm],
    chunks: Sequence[RequestChunk],
    settings: AnsweringSettings,
    *,
    title: str,
    say: Callable[[str], None],
) -> Iterator[tuple[str, ArmResponses]]:
    """Answer all chunks with all arms, which are given by their ids in the store; yield the id and the responses of
    each finished arm. ``say`` receives the notes of the responses.

    What the ledger has is not computed again. A chunk is answered completely or not at all, so that a resumed run has
    the same batches, and the same digits, as an undisturbed one.
    """
    missing = {arm_id: {c.index for c in chunks if ledger.get(c.key(arm_id)) is None} for arm_id in arms}
    with Progress(title, len(arms) * sum(len(chunk.hashes) for chunk in chunks), "request") as progress:
        progress.skip(sum(len(c.hashes) for left in missing.values() for c in chunks if c.index not in left))
        for arm_id, left in missing.items():
            if not left:
                yield arm_id, _responses(ledger, arm_id, chunks)
        schedule = _Schedule(arms, missing, chunks, settings)
        notes = {""}
        for finished in pool.map(answer_item, schedule.pool_items()):
            arm_ids, chunk = schedule.take_finished(finished)
            for note in {each.note for each in finished.value} - notes:
                say(note)
                notes.add(note)
            # At once for all arms, or the rate would be that of one arm.
            progress.update(len(chunk.hashes) * len(arm_ids))
            for arm_id, answers in zip(arm_ids, finished.value, strict=True):
                texts = [value for value in answers.values if isinstance(value, str)]
                ledger.add(chunk.key(arm_id), _numbers(answers), texts=texts, arm_id=arm_id)
                missing[arm_id].discard(chunk.index)
                if not missing[arm_id]:
                    yield arm_id, _responses(ledger, arm_id, chunks)


def _numbers(answers: Responses[LogLikelihood | str]) -> NDArray[np.float64]:
    """Return log-likelihoods, numbers of greedy tokens and ablated shares (3, requests); NaN where there are none."""
    pairs = [(None, None) if isinstance(value, str) else value for value in answers.values]
    return np.array([*zip(*pairs, strict=True), answers.ablated_shares], dtype=np.float64)


def _responses(ledger: Ledger, arm_id: str, chunks: Sequence[RequestChunk]) -> ArmResponses:
    """Return all responses of an arm, and free them, because a sweep has hundreds of arms."""
    responses: ArmResponses = {}
    keys = [chunk.key(arm_id) for chunk in chunks]
    for chunk, key in zip(chunks, keys, strict=True):
        numbers = ledger.get(key)
        assert numbers is not None
        log_likelihoods, greedy, shares = numbers.reshape(3, -1).tolist()
        values: Iterable[LogLikelihood | str] = ledger.texts(key) or [
            # The loss of a labelled example does not show which tokens greedy decoding would choose.
            LogLikelihood(nats, None if isnan(tokens) else int(tokens))  # type: ignore[arg-type]
            for nats, tokens in zip(log_likelihoods, greedy, strict=True)
        ]
        responses.update(zip(chunk.hashes, zip(values, shares, strict=True), strict=True))
    ledger.forget(keys)
    return responses


class _Schedule:
    """The items of a pool, and which arms and requests each has. A stop loses unfinished items, so more than
    `BUNDLE_SIZE` arms share one only if they are fast: at 2 ms for a token of one arm, 10 masks answer a chunk of 1,000
    tokens together. Slow models keep bundles of `BUNDLE_SIZE`, because smaller ones would run the shared layers more
    often.

    ``missing`` has the numbers of the chunks that each arm has not answered.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        missing: Mapping[str, Collection[int]],
        chunks: Sequence[RequestChunk],
        settings: AnsweringSettings,
    ) -> None:
        self._arms, self._missing, self._chunks, self._settings = arms, missing, chunks, settings
        self._in_flight: dict[str, tuple[list[str], RequestChunk]] = {}
        self._bundle_seconds = self._bundle_tokens = 0.0

    def pool_items(self) -> Iterator[AnswerItem]:
        """Yield the items: each chunk for each bundle of arms, or for a part of it, that lacks its answers. Arms are
        bundled if their passes could share layers; the replica decides whether they do.
        """
        arm_ids = [arm_id for arm_id in self._arms if self._missing[arm_id]]
        changes = [self._arms[arm_id].intervention for arm_id in arm_ids]
        starts = [None if change is None else latest_start(change) for change in changes]
        for bundle in bundle_passes(starts, self._settings.bundle_size):
            for chunk in self._chunks:
                of_bundle = [arm_ids[index] for index in bundle]
                unanswered = [arm_id for arm_id in of_bundle if chunk.index in self._missing[arm_id]]
                while unanswered:
                    most_arms = self._most_arms(chunk)
                    item_ids, unanswered = unanswered[:most_arms], unanswered[most_arms:]
                    item_arms = [self._arms[arm_id] for arm_id in item_ids]
                    item = AnswerItem(
                        f"{_arm_names(item_arms)}, requests {chunk.index}",
                        chunk.requests,
                        tuple(arm.intervention for arm in item_arms),
                        self._settings,
                    )
                    self._in_flight[item.name] = item_ids, chunk
                    yield item

    def take_finished(self, finished: Finished[AnswerItem, Any]) -> tuple[list[str], RequestChunk]:
        """Return the ids of the arms and the requests of a finished item, whose time counts for the next bundles."""
        arm_ids, chunk = self._in_flight.pop(finished.item.name)
        if len(arm_ids) > 1:
            self._bundle_seconds += finished.seconds
            self._bundle_tokens += len(arm_ids) * _tokens(chunk.requests)
        return arm_ids, chunk

    def _most_arms(self, chunk: RequestChunk) -> int:
        """Return how many arms are answered in `_BUNDLE_SECONDS`, at least `BUNDLE_SIZE`, and exactly that before the
        first bundle is measured; 1 if the requests of a chunk cannot be bundled.
        """
        if not chunk.can_bundle:
            return 1
        seconds_of_arm = self._bundle_seconds / max(1.0, self._bundle_tokens) * _tokens(chunk.requests)
        return max(BUNDLE_SIZE, int(_BUNDLE_SECONDS / seconds_of_arm)) if seconds_of_arm else BUNDLE_SIZE


def _arm_names(arms: Sequence[Arm]) -> str:
    first, others = arms[0].name, len(arms) - 1
    return f"{first} and {others} more" if others else first


def _tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.ids) for request in requests)
