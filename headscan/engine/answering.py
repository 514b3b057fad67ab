"""Answering of requests: arms run on replicas, answers are stored as they arrive, and stopped runs resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from headscan.cluster.pool import Finished, Pool
from headscan.engine.answer import AnsweringSettings, AnswerItem, answer_item
from headscan.engine.arms import Arm
from headscan.engine.bundles import BUNDLE_SIZE, bundle_passes, latest_start
from headscan.errors import FinishedArmError, StoreError
from headscan.runs.progress import Progress
from headscan.store.store import Store
from headscan.store.tables import TABLES
from headscan.texts.prefix_tree import common_tokens
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, Responses

#: Approximate number of chunks per arm; fewer if chunks would be smaller than a batch.
_CHUNKS_PER_ARM = 64


@dataclass(frozen=True)
class RequestChunk:
    """Requests of one kind and their hashes."""

    index: int
    hashes: tuple[str, ...]
    requests: tuple[Any, ...]

    @property
    def can_bundle(self) -> bool:
        """True if one item can answer it for several masks."""
        return isinstance(self.requests[0], Request)


def request_chunks(requests: Mapping[str, Request | GenerationRequest], batch_tokens: int) -> list[RequestChunk]:
    """Return the chunks of all requests, given by hash. The same requests give the same chunks."""
    scored = {key: request for key, request in requests.items() if isinstance(request, Request)}
    prompts = {key: request for key, request in requests.items() if isinstance(request, GenerationRequest)}
    hashes_of_chunks = [*_cut(*_by_prefix(scored), batch_tokens), *_cut(*_by_length(prompts), batch_tokens)]
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
#: A stop loses at most the answers of so many seconds; opening the store for every chunk would cost more.
_SECONDS_BETWEEN_WRITES = 5.0

_RESPONSES = TABLES["responses"].schema(without=("arm_id",))


class BegunArm(NamedTuple):
    """An arm with its id in the store."""

    arm: Arm
    arm_id: str


@dataclass
class ArmResponses:
    """Responses and ablated shares (0 to 1) of an arm by the request's hash, and the indices of unanswered chunks."""

    arm: Arm
    arm_id: str
    responses: dict[str, LogLikelihood | str] = field(default_factory=dict)
    ablated_shares: dict[str, float] = field(default_factory=dict)
    unanswered_chunks: set[int] = field(default_factory=set)

    def take(self, chunk: RequestChunk, chunk_responses: Responses[LogLikelihood | str]) -> None:
        """Add the responses to all requests of a chunk."""
        self.responses.update(zip(chunk.hashes, chunk_responses.values, strict=True))
        self.ablated_shares.update(zip(chunk.hashes, chunk_responses.ablated_shares, strict=True))
        self.unanswered_chunks.discard(chunk.index)

    def forget(self) -> None:
        """Free the responses: a sweep has hundreds of arms."""
        self.responses, self.ablated_shares = {}, {}


def answer_arms(
    store: Store,
    pool: Pool,
    arms: Sequence[BegunArm],
    chunks: Sequence[RequestChunk],
    settings: AnsweringSettings,
    *,
    title: str,
    say: Callable[[str], None],
) -> Iterator[ArmResponses]:
    """Answer all chunks with all arms; yield each finished arm. ``say`` receives the notes of the responses.

    Stored answers are not computed again. A chunk is answered completely or not at all, so that a resumed run has the
    same batches, and the same digits, as an undisturbed one.
    """
    responses_of_arms = _stored_responses(store, arms, chunks)
    total = len(arms) * sum(len(chunk.hashes) for chunk in chunks)
    unanswered = sum(
        len(chunks[index].hashes) for arm_responses in responses_of_arms for index in arm_responses.unanswered_chunks
    )
    writer = _ResponseWriter(store)
    with Progress(title, total, "requests") as progress:
        progress.skip(total - unanswered)
        for arm_responses in responses_of_arms:
            if not arm_responses.unanswered_chunks:
                yield arm_responses
                arm_responses.forget()
        try:
            schedule = _Schedule(responses_of_arms, chunks, settings)
            notes = {""}
            for finished in pool.map(answer_item, schedule.pool_items()):
                item_arms, chunk = schedule.take_finished(finished)
                for note in {each.note for each in finished.value} - notes:
                    say(note)
                    notes.add(note)
                # At once for all arms, or the rate would be that of one arm.
                progress.update(len(chunk.hashes) * len(item_arms))
                for arm_responses, chunk_responses in zip(item_arms, finished.value, strict=True):
                    arm_responses.take(chunk, chunk_responses)
                    if arm_responses.unanswered_chunks:
                        writer.add(arm_responses, chunk)
                    else:
                        writer.drop(arm_responses)  # a finished arm is stored as a whole
                        yield arm_responses
                        arm_responses.forget()
                writer.write(at_least_after=_SECONDS_BETWEEN_WRITES)
        except BaseException:
            with suppress(StoreError):  # the first error is the one to report
                writer.write()
            raise
        writer.write()


class _Schedule:
    """The items of a pool, and which arms and requests each has. A stop loses unfinished items, so more than
    `BUNDLE_SIZE` arms share one only if they are fast: at 2 ms for a token of one arm, 10 masks answer a chunk of 1,000
    tokens together. Slow models keep bundles of `BUNDLE_SIZE`, because smaller ones would run the shared layers more
    often.
    """

    def __init__(
        self, responses_of_arms: Sequence[ArmResponses], chunks: Sequence[RequestChunk], settings: AnsweringSettings
    ) -> None:
        self._responses_of_arms, self._chunks, self._settings = responses_of_arms, chunks, settings
        self._in_flight: dict[str, tuple[list[ArmResponses], RequestChunk]] = {}
        self._bundle_seconds = self._bundle_tokens = 0.0

    def pool_items(self) -> Iterator[AnswerItem]:
        """Yield the items: each chunk for each bundle of arms, or for a part of it, that lacks its answers. Arms are
        bundled if their passes could share layers; the replica decides whether they do.
        """
        changes = [arm_responses.arm.intervention for arm_responses in self._responses_of_arms]
        starts = [None if change is None else latest_start(change) for change in changes]
        for arm_indices in bundle_passes(starts, self._settings.bundle_size):
            bundled = [self._responses_of_arms[index] for index in arm_indices]
            for chunk in self._chunks:
                unanswered = [
                    arm_responses for arm_responses in bundled if chunk.index in arm_responses.unanswered_chunks
                ]
                while unanswered:
                    most_arms = self._most_arms(chunk)
                    item_arms, unanswered = unanswered[:most_arms], unanswered[most_arms:]
                    item = AnswerItem(
                        f"{_arm_names(item_arms)}, requests {chunk.index}",
                        chunk.requests,
                        tuple(arm_responses.arm.intervention for arm_responses in item_arms),
                        self._settings,
                    )
                    self._in_flight[item.name] = item_arms, chunk
                    yield item

    def take_finished(self, finished: Finished[AnswerItem, Any]) -> tuple[list[ArmResponses], RequestChunk]:
        """Return the arms and the requests of a finished item, whose time counts for the next bundles."""
        item_arms, chunk = self._in_flight.pop(finished.item.name)
        if len(item_arms) > 1:
            self._bundle_seconds += finished.seconds
            self._bundle_tokens += len(item_arms) * _tokens(chunk.requests)
        return item_arms, chunk

    def _most_arms(self, chunk: RequestChunk) -> int:
        """Return how many arms are answered in `_BUNDLE_SECONDS`, at least `BUNDLE_SIZE`, and exactly that before the
        first bundle is measured; 1 if the requests of a chunk cannot be bundled.
        """
        if not chunk.can_bundle:
            return 1
        seconds_of_arm = self._bundle_seconds / max(1.0, self._bundle_tokens) * _tokens(chunk.requests)
        return max(BUNDLE_SIZE, int(_BUNDLE_SECONDS / seconds_of_arm)) if seconds_of_arm else BUNDLE_SIZE


def _arm_names(item_arms: Sequence[ArmResponses]) -> str:
    first, others = item_arms[0].arm.name, len(item_arms) - 1
    return f"{first} and {others} more" if others else first


def _tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.ids) for request in requests)


class _ResponseWriter:
    """Stores the responses of unfinished arms, in one write for several chunks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, tuple[ArmResponses, list[str]]] = {}
        self._written = time.monotonic()

    def add(self, arm_responses: ArmResponses, chunk: RequestChunk) -> None:
        self._waiting.setdefault(arm_responses.arm_id, (arm_responses, []))[1].extend(chunk.hashes)

    def drop(self, arm_responses: ArmResponses) -> None:
        self._waiting.pop(arm_responses.arm_id, None)

    def write(self, *, at_least_after: float = 0.0) -> None:
        if time.monotonic() - self._written < at_least_after:
            return
        for arm_responses, hashes in self._waiting.values():
            # Another process may have finished the arm with the same answers.
            with suppress(FinishedArmError):
                self._store.add_responses(arm_responses.arm_id, _response_table(arm_responses, hashes))
        self._waiting.clear()
        self._written = time.monotonic()


def _response_table(arm_responses: ArmResponses, hashes: Sequence[str]) -> pa.Table:
    rows = []
    for key in hashes:
        response = arm_responses.responses[key]
        columns = {"text": response} if isinstance(response, str) else response._asdict()
        rows.append({"request": key, "ablated_share": arm_responses.ablated_shares[key], **columns})
    return pa.Table.from_pylist(rows, schema=_RESPONSES)


def _stored_responses(store: Store, arms: Sequence[BegunArm], chunks: Sequence[RequestChunk]) -> list[ArmResponses]:
    """Return the responses of each arm that the store has."""
    by_arm_id = {arm_id: ArmResponses(arm, arm_id) for arm, arm_id in arms}
    for row in store.responses(list(by_arm_id)).to_pylist():
        arm_responses = by_arm_id[row["arm_id"]]
        arm_responses.responses[row["request"]] = _response_of(row)
        arm_responses.ablated_shares[row["request"]] = row["ablated_share"]
    for arm_responses in by_arm_id.values():
        answered = arm_responses.responses.keys()
        arm_responses.unanswered_chunks = {chunk.index for chunk in chunks if not answered >= set(chunk.hashes)}
    return list(by_arm_id.values())


def _response_of(row: Mapping[str, object]) -> LogLikelihood | str:
    if row["text"] is not None:
        return str(row["text"])
    return LogLikelihood(row["log_likelihood"], row["greedy_tokens"])  # type: ignore[arg-type]
