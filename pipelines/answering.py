"""Arms answer requests: over the pool's replicas, stored as they come, and gone on with after a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from analysis.store import Store
from cluster.pool import Pool
from headscan.interventions import HeadMask
from headscan.loading import LoadedModel
from pipelines.arms import Arm
from pipelines.bundles import BundleItem, bundle, entry_layer, score_bundle
from pipelines.generation import GenerationItem, GenerationResult, generate_texts
from pipelines.likelihood import LikelihoodItem, LikelihoodResult, score_requests
from pipelines.progress import Progress
from pipelines.requests import Likelihood
from pipelines.workload import WorkItem

#: A stop loses at most what was answered in so many seconds; to open the store for every item would cost more.
_SECONDS_BETWEEN_LANDINGS = 5.0

_RESPONSES = pa.schema(
    {
        "request": pa.string(),
        "log_likelihood": pa.float64(),
        "greedy_tokens": pa.int32(),
        "text": pa.string(),
        "zeroed_share": pa.float64(),
    }
)


@dataclass
class ArmAnswers:
    """What an arm has answered so far, by the request's hash.

    Attributes:
        zeroed: The share of heads that was silenced in it, 0 to 1.
    """

    arm: Arm
    arm_id: str
    answers: dict[str, Likelihood | str] = field(default_factory=dict)
    zeroed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmsItem:
    """The work of some arms, given by their index, on one item."""

    arms: tuple[int, ...]
    item: WorkItem
    work: BundleItem | LikelihoodItem | GenerationItem

    @property
    def name(self) -> str:
        return self.work.name


def answer_item(lm: LoadedModel, item: ArmsItem) -> Sequence[LikelihoodResult | GenerationResult]:
    """A pool task: answer one item for each of its arms."""
    if isinstance(item.work, BundleItem):
        return score_bundle(lm, item.work)
    if isinstance(item.work, LikelihoodItem):
        return [score_requests(lm, item.work)]
    return [generate_texts(lm, item.work)]


def answer(
    store: Store,
    pool: Pool,
    arms: Sequence[tuple[Arm, str]],
    items: Sequence[WorkItem],
    *,
    batch_tokens: int,
    share_prefixes: bool,
    enterable: frozenset[int],
    title: str,
) -> Iterator[ArmAnswers]:
    """Let arms, given with their identity in the store, answer all items; yields each when it has.

    What an earlier run stored is not asked again. Items are whole or missing, so the batches, and with them every last
    digit, are those of an undisturbed run.

    Args:
        enterable: Layers where a forward pass may begin, so that masks share what lies below their first head.
    """
    found = [_stored(store, arm, arm_id) for arm, arm_id in arms]
    missing = [{item.index for item in items if not done.answers.keys() >= set(item.hashes)} for done in found]
    left = [len(of_arm) for of_arm in missing]
    yield from (done for done, count in zip(found, left, strict=True) if not count)

    def todo() -> Iterator[ArmsItem]:
        for group in bundle([arm.silenced for arm, _ in arms], enterable):
            for item in items:
                lacking = [index for index in group if item.index in missing[index]]
                if item.scored and len(lacking) > 1:
                    masks = [arms[index][0] for index in lacking]
                    yield ArmsItem(
                        tuple(lacking), item, _together(masks, item, enterable, batch_tokens, share_prefixes)
                    )
                else:
                    for index in lacking:
                        yield ArmsItem((index,), item, _alone(arms[index][0], item, batch_tokens, share_prefixes))

    total = sum(len(item.hashes) for item in items)
    landing: dict[int, list[WorkItem]] = {}
    landed = time.monotonic()
    with Progress(title, total * len(arms), "requests") as progress:
        progress.skip(sum(len(item.hashes) for of_arm in missing for item in items if item.index not in of_arm))
        try:
            for finished in pool.map(answer_item, todo()):
                item = finished.item.item
                for index, result in zip(finished.item.arms, finished.value, strict=True):
                    done = found[index]
                    done.answers.update(zip(item.hashes, result.answers, strict=True))
                    done.zeroed.update(zip(item.hashes, result.zeroed_shares, strict=True))
                    progress.update(len(item.hashes))
                    left[index] -= 1
                    if left[index]:
                        landing.setdefault(index, []).append(item)
                    else:
                        landing.pop(index, None)  # the finished arm is stored as a whole
                        yield done
                if time.monotonic() - landed > _SECONDS_BETWEEN_LANDINGS:
                    _land(store, found, landing)
                    landed = time.monotonic()
        finally:
            _land(store, found, landing)


def _alone(arm: Arm, item: WorkItem, batch_tokens: int, share_prefixes: bool) -> LikelihoodItem | GenerationItem:
    name = f"{arm.name}, requests {item.index}"
    if item.scored:
        return LikelihoodItem(name, item.scored, arm.silenced, batch_tokens, share_prefixes)
    return GenerationItem(name, item.written, arm.silenced, batch_tokens)


def _together(
    arms: Sequence[Arm], item: WorkItem, enterable: frozenset[int], batch_tokens: int, share_prefixes: bool
) -> BundleItem:
    masks = tuple(arm.silenced for arm in arms if isinstance(arm.silenced, HeadMask | None))
    entries = tuple(entry_layer(mask, enterable) or 0 for mask in masks)
    name = f"{arms[0].name} and {len(arms) - 1} more, requests {item.index}"
    return BundleItem(name, item.scored, masks, entries, batch_tokens, share_prefixes)


def _land(store: Store, found: Sequence[ArmAnswers], landing: dict[int, list[WorkItem]]) -> None:
    for index, items in landing.items():
        hashes = [found_hash for item in items for found_hash in item.hashes]
        store.add_responses(found[index].arm_id, _response_table(found[index], hashes))
    landing.clear()


def _response_table(done: ArmAnswers, hashes: Sequence[str]) -> pa.Table:
    rows = []
    for found in hashes:
        answer = done.answers[found]
        columns = {"text": answer} if isinstance(answer, str) else answer._asdict()
        rows.append({"request": found, "zeroed_share": done.zeroed[found], **columns})
    return pa.Table.from_pylist(rows, schema=_RESPONSES)


def _stored(store: Store, arm: Arm, arm_id: str) -> ArmAnswers:
    done = ArmAnswers(arm, arm_id)
    for row in store.responses(arm_id).to_pylist():
        done.answers[row["request"]] = _answer(row)
        done.zeroed[row["request"]] = row["zeroed_share"]
    return done


def _answer(row: Mapping[str, object]) -> Likelihood | str:
    if row["text"] is not None:
        return str(row["text"])
    return Likelihood(row["log_likelihood"], row["greedy_tokens"])  # type: ignore[arg-type]
