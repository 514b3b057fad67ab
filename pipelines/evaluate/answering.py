"""Answering of requests: arms run on replicas, answers are stored as they arrive, and stopped runs resume."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa

from headscan.analysis.errors import FinishedArmError
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import TABLES
from headscan.cluster.pool import Finished, Pool, Task
from headscan.pipelines.runs.progress import Progress
from headscan.pipelines.scoring.arms import Arm
from headscan.pipelines.scoring.bundles import BUNDLE_SIZE, Start, bundle
from headscan.pipelines.scoring.prefix_tree import common_tokens
from headscan.pipelines.scoring.reading import PromptReading
from headscan.pipelines.scoring.staged_likelihood import score_in_ranges
from headscan.pipelines.scoring.token_requests import (
    GenerationRequest,
    LogLikelihood,
    Request,
    Responses,
    ScoringItem,
    answer_item,
)

#: Approximate number of chunks per arm; fewer if chunks would be smaller than a batch.
_CHUNKS = 64


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
    scored = _by_prefix({h: request for h, request in requests.items() if isinstance(request, Request)})
    written = _by_length({h: request for h, request in requests.items() if isinstance(request, GenerationRequest)})
    parts = [part for order, costs in (scored, written) for part in _cut(order, costs, batch_tokens)]
    return [RequestChunk(i, tuple(part), tuple(requests[h] for h in part)) for i, part in enumerate(parts)]


def _by_prefix(requests: Mapping[str, Request]) -> tuple[list[str], list[int]]:
    """Return the hashes of requests sorted by prefix, and each one's new tokens."""
    order = sorted(requests, key=lambda h: (requests[h].ids, requests[h].scored_tokens))
    ids = [requests[h].ids for h in order]
    lengths = [len(tokens) for tokens in ids]
    costs = [lengths[i] - common_tokens(ids, lengths, i - 1, i) if i else lengths[i] for i in range(len(ids))]
    return order, costs


def _by_length(requests: Mapping[str, GenerationRequest]) -> tuple[list[str], list[int]]:
    """Return the hashes of prompts by generation options, the longest first, and their tokens with generated ones."""
    options = {h: repr((each.until, each.max_new_tokens, each.options)) for h, each in requests.items()}
    order = sorted(requests, key=lambda h: (options[h], -len(requests[h].ids), h))
    return order, [len(requests[h].ids) + requests[h].max_new_tokens for h in order]


def _cut(hashes: Sequence[str], costs: Sequence[int], batch_tokens: int) -> list[Sequence[str]]:
    size = max(batch_tokens, sum(costs) // _CHUNKS)
    starts, tokens = [0], 0
    for index, cost in enumerate(costs):
        if tokens and tokens + cost > size:
            starts.append(index)
            tokens = 0
        tokens += cost
    return [hashes[a:b] for a, b in pairwise([*starts, len(hashes)]) if b > a]


#: Longest work of a bundle; progress is printed, and answers are stored, when one ends.
_BUNDLE_SECONDS = 20.0
#: A stop loses at most the answers of so many seconds; opening the store for every chunk would cost more.
_SECONDS_BETWEEN_WRITES = 5.0

_RESPONSES = TABLES["responses"].schema(without=("arm_id",))


@dataclass(frozen=True)
class AnsweringSettings:
    """Settings that all arms of a run share. A forward pass can start at ``starts``, so that up to ``bundle_size``
    masks at a time share what runs before their first head.
    """

    batch_tokens: int
    reading: PromptReading
    starts: frozenset[Start] = frozenset()
    bundle_size: int = BUNDLE_SIZE


@dataclass
class ArmResponses:
    """Responses and ablated shares (0 to 1) of an arm by the request's hash, and the indices of unanswered chunks."""

    arm: Arm
    arm_id: str
    responses: dict[str, LogLikelihood | str] = field(default_factory=dict)
    ablated_shares: dict[str, float] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)

    def take(self, chunk: RequestChunk, result: Responses[LogLikelihood | str]) -> None:
        self.responses.update(zip(chunk.hashes, result.values, strict=True))
        self.ablated_shares.update(zip(chunk.hashes, result.ablated_shares, strict=True))
        self.missing.discard(chunk.index)

    def forget(self) -> None:
        """Free the responses: a sweep has hundreds of arms."""
        self.responses, self.ablated_shares = {}, {}


def answer_arms(
    store: Store,
    pool: Pool,
    arms: Sequence[tuple[Arm, str]],
    chunks: Sequence[RequestChunk],
    settings: AnsweringSettings,
    *,
    title: str,
) -> Iterator[ArmResponses]:
    """Answer all chunks with all arms, given with their ids in the store; yield each finished arm.

    Stored answers are not computed again. A chunk is answered completely or not at all, so that a resumed run has the
    same batches, and the same digits, as an undisturbed one.
    """
    by_arm = _stored(store, arms, chunks)
    total = sum(len(chunk.hashes) for chunk in chunks)
    left = sum(len(chunks[index].hashes) for of_arm in by_arm for index in of_arm.missing)
    writer = _ResponseWriter(store)
    with Progress(title, total * len(arms), "requests") as progress:
        progress.skip(total * len(arms) - left)
        for of_arm in by_arm:
            if not of_arm.missing:
                yield of_arm
                of_arm.forget()
        try:
            schedule = _Schedule(by_arm, chunks, settings)
            task: Task[Any, Any] = score_in_ranges if pool.staged else answer_item
            for done in pool.map(task, schedule.pool_items()):
                some, chunk = schedule.finished(done)
                progress.update(len(chunk.hashes) * len(some))  # at once, or the rate would be that of one arm
                for of_arm, result in zip(some, done.value, strict=True):
                    of_arm.take(chunk, result)
                    if of_arm.missing:
                        writer.add(of_arm, chunk)
                    else:
                        writer.drop(of_arm)  # a finished arm is stored as a whole
                        yield of_arm
                        of_arm.forget()
                writer.write(at_least_after=_SECONDS_BETWEEN_WRITES)
        finally:
            writer.write()


class _Schedule:
    """The items of a pool, and which arms and requests each has. The time of one token of one arm limits the arms of a
    bundle, because a stop loses an unfinished one.
    """

    def __init__(
        self, by_arm: Sequence[ArmResponses], chunks: Sequence[RequestChunk], settings: AnsweringSettings
    ) -> None:
        self._by_arm, self._chunks, self._settings = by_arm, chunks, settings
        self._in_flight: dict[str, tuple[list[ArmResponses], RequestChunk]] = {}
        self._seconds = self._tokens = 0.0

    def pool_items(self) -> Iterator[ScoringItem[Any]]:
        settings = self._settings
        ablated = [of_arm.arm.intervention for of_arm in self._by_arm]
        for group in bundle(ablated, settings.starts, settings.bundle_size):
            for chunk in self._chunks:
                lacking = [self._by_arm[index] for index in group if chunk.index in self._by_arm[index].missing]
                while lacking:
                    most = self._most_arms(chunk)
                    some, lacking = lacking[:most], lacking[most:]
                    item = self._pool_item([of_arm.arm for of_arm in some], chunk)
                    self._in_flight[item.name] = some, chunk
                    yield item

    def finished(self, done: Finished[ScoringItem[Any], Any]) -> tuple[list[ArmResponses], RequestChunk]:
        """Return the arms and the requests of a finished item of the pool."""
        some, chunk = self._in_flight.pop(done.item.name)
        if len(some) > 1:
            self._seconds += done.seconds
            self._tokens += len(some) * _tokens(chunk.requests)
        return some, chunk

    def _most_arms(self, chunk: RequestChunk) -> int:
        """Return how many arms are answered in `_BUNDLE_SECONDS`; `BUNDLE_SIZE` before the first bundle is measured."""
        if not chunk.can_bundle:
            return 1
        seconds = self._seconds / max(1.0, self._tokens) * _tokens(chunk.requests)
        return max(BUNDLE_SIZE, int(_BUNDLE_SECONDS / seconds)) if seconds else BUNDLE_SIZE

    def _pool_item(self, arms: Sequence[Arm], chunk: RequestChunk) -> ScoringItem[Any]:
        settings, of_chunk = self._settings, f"requests {chunk.index}"
        if len(arms) == 1:
            name = f"{arms[0].name}, {of_chunk}"
            return settings.reading.item(name, chunk.requests, arms[0].intervention, settings.batch_tokens)
        masks, name = tuple(arm.intervention for arm in arms), f"{arms[0].name} and {len(arms) - 1} more, {of_chunk}"
        return settings.reading.bundle(name, chunk.requests, masks, settings.starts, settings.batch_tokens)


def _tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.ids) for request in requests)


class _ResponseWriter:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, tuple[ArmResponses, list[str]]] = {}
        self._written = time.monotonic()

    def add(self, of_arm: ArmResponses, chunk: RequestChunk) -> None:
        self._waiting.setdefault(of_arm.arm_id, (of_arm, []))[1].extend(chunk.hashes)

    def drop(self, of_arm: ArmResponses) -> None:
        self._waiting.pop(of_arm.arm_id, None)

    def write(self, *, at_least_after: float = 0.0) -> None:
        if time.monotonic() - self._written < at_least_after:
            return
        for of_arm, hashes in self._waiting.values():
            # Another process may have finished the arm with the same answers.
            with suppress(FinishedArmError):
                self._store.add_responses(of_arm.arm_id, _response_table(of_arm, hashes))
        self._waiting.clear()
        self._written = time.monotonic()


def _response_table(done: ArmResponses, hashes: Sequence[str]) -> pa.Table:
    rows = []
    for request in hashes:
        response = done.responses[request]
        columns = {"text": response} if isinstance(response, str) else response._asdict()
        rows.append({"request": request, "ablated_share": done.ablated_shares[request], **columns})
    return pa.Table.from_pylist(rows, schema=_RESPONSES)


def _stored(store: Store, arms: Sequence[tuple[Arm, str]], chunks: Sequence[RequestChunk]) -> list[ArmResponses]:
    by_arm = {arm_id: ArmResponses(arm, arm_id) for arm, arm_id in arms}
    for row in store.responses(list(by_arm)).to_pylist():
        of_arm = by_arm[row["arm_id"]]
        of_arm.responses[row["request"]] = _response_of(row)
        of_arm.ablated_shares[row["request"]] = row["ablated_share"]
    for of_arm in by_arm.values():
        of_arm.missing = {chunk.index for chunk in chunks if not of_arm.responses.keys() >= set(chunk.hashes)}
    return list(by_arm.values())


def _response_of(row: Mapping[str, object]) -> LogLikelihood | str:
    if row["text"] is not None:
        return str(row["text"])
    return LogLikelihood(row["log_likelihood"], row["greedy_tokens"])  # type: ignore[arg-type]
