"""Answering of requests: arms run on replicas, answers are stored as they arrive, and stopped runs resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request

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


#: Responses of an arm by the hash of the request, each with the share of heads that it ablated, 0 to 1.
ArmResponses = dict[str, tuple[LogLikelihood | str, float]]


def answer_arms(
    store: Store,
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

    Stored answers are not computed again. A chunk is answered completely or not at all, so that a resumed run has the
    same batches, and the same digits, as an undisturbed one.
    """
    responses = _stored_responses(store, arms)
    requests_of_arm = sum(len(chunk.hashes) for chunk in chunks)
    writer = _ResponseWriter(store, responses)
    with Progress(title, len(arms) * requests_of_arm, "requests") as progress:
        progress.skip(sum(map(len, responses.values())))
        # Those of finished arms are freed, because a sweep has hundreds of arms.
        for arm_id in arms:
            if len(responses[arm_id]) == requests_of_arm:
                yield arm_id, responses.pop(arm_id)
        try:
            schedule = _Schedule(arms, responses, chunks, settings)
            notes = {""}
            for finished in pool.map(answer_item, schedule.pool_items()):
                arm_ids, chunk = schedule.take_finished(finished)
                for note in {each.note for each in finished.value} - notes:
                    say(note)
                    notes.add(note)
                # At once for all arms, or the rate would be that of one arm.
                progress.update(len(chunk.hashes) * len(arm_ids))
                for arm_id, answers in zip(arm_ids, finished.value, strict=True):
                    given = zip(answers.values, answers.ablated_shares, strict=True)
                    responses[arm_id].update(zip(chunk.hashes, given, strict=True))
                    if len(responses[arm_id]) < requests_of_arm:
                        writer.add(arm_id, chunk)
                    else:
                        writer.drop(arm_id)  # a finished arm is stored as a whole
                        yield arm_id, responses.pop(arm_id)
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

    An arm without an entry in ``responses`` is finished.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        responses: Mapping[str, ArmResponses],
        chunks: Sequence[RequestChunk],
        settings: AnsweringSettings,
    ) -> None:
        self._arms, self._responses, self._chunks, self._settings = arms, responses, chunks, settings
        self._in_flight: dict[str, tuple[list[str], RequestChunk]] = {}
        self._bundle_seconds = self._bundle_tokens = 0.0

    def pool_items(self) -> Iterator[AnswerItem]:
        """Yield the items: each chunk for each bundle of arms, or for a part of it, that lacks its answers. Arms are
        bundled if their passes could share layers; the replica decides whether they do.
        """
        arm_ids = [arm_id for arm_id in self._arms if arm_id in self._responses]
        changes = [self._arms[arm_id].intervention for arm_id in arm_ids]
        starts = [None if change is None else latest_start(change) for change in changes]
        for bundle in bundle_passes(starts, self._settings.bundle_size):
            for chunk in self._chunks:
                unanswered = [arm_ids[index] for index in bundle if self._lacks(arm_ids[index], chunk)]
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

    def _lacks(self, arm_id: str, chunk: RequestChunk) -> bool:
        """Return True if an arm that is not finished has not answered a chunk."""
        responses = self._responses.get(arm_id)
        return responses is not None and any(key not in responses for key in chunk.hashes)

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


class _ResponseWriter:
    """Stores the responses of unfinished arms, in one write for several chunks."""

    def __init__(self, store: Store, responses: Mapping[str, ArmResponses]) -> None:
        self._store, self._responses = store, responses
        self._waiting: dict[str, list[str]] = {}
        self._written = time.monotonic()

    def add(self, arm_id: str, chunk: RequestChunk) -> None:
        self._waiting.setdefault(arm_id, []).extend(chunk.hashes)

    def drop(self, arm_id: str) -> None:
        self._waiting.pop(arm_id, None)

    def write(self, *, at_least_after: float = 0.0) -> None:
        if time.monotonic() - self._written < at_least_after:
            return
        for arm_id, hashes in self._waiting.items():
            # Another process may have finished the arm with the same answers.
            with suppress(FinishedArmError):
                self._store.add_responses(arm_id, _response_table(self._responses[arm_id], hashes))
        self._waiting.clear()
        self._written = time.monotonic()


def _response_table(responses: ArmResponses, hashes: Sequence[str]) -> pa.Table:
    rows = []
    for key in hashes:
        response, share = responses[key]
        columns = {"text": response} if isinstance(response, str) else response._asdict()
        rows.append({"request": key, "ablated_share": share, **columns})
    return pa.Table.from_pylist(rows, schema=_RESPONSES)


def _stored_responses(store: Store, arm_ids: Iterable[str]) -> dict[str, ArmResponses]:
    """Return the responses of each arm that the store has, by the arm's id."""
    responses: dict[str, ArmResponses] = {arm_id: {} for arm_id in arm_ids}
    for row in store.responses(list(responses)).to_pylist():
        responses[row["arm_id"]][row["request"]] = _response_of(row), row["ablated_share"]
    return responses


def _response_of(row: Mapping[str, object]) -> LogLikelihood | str:
    if row["text"] is not None:
        return str(row["text"])
    return LogLikelihood(row["log_likelihood"], row["greedy_tokens"])  # type: ignore[arg-type]
