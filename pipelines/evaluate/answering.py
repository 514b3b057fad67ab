"""Arms answer requests: over the pool's replicas, stored as they come, and gone on with after a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from headscan.analysis.errors import FinishedArmError
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.evaluate.workload import WorkItem
from headscan.pipelines.runs.progress import Progress
from headscan.pipelines.scoring.arms import Arm
from headscan.pipelines.scoring.bundles import BundleItem, bundle, resume_layer, score_bundle
from headscan.pipelines.scoring.generation import GenerationItem, GenerationResult, generate_texts
from headscan.pipelines.scoring.likelihood import LikelihoodItem, LikelihoodResult, score_requests
from headscan.pipelines.scoring.scoring_mode import Reading
from headscan.pipelines.scoring.shared_row_likelihood import SharedRowItem, score_shared_rows
from headscan.pipelines.scoring.staged_likelihood import score_in_ranges
from headscan.pipelines.scoring.token_requests import Likelihood

#: A stop loses at most what was answered in so many seconds; to open the store for every item would cost more.
_SECONDS_BETWEEN_WRITES = 5.0

_RESPONSES = pa.schema(
    {
        "request": pa.string(),
        "log_likelihood": pa.float64(),
        "greedy_tokens": pa.int32(),
        "text": pa.string(),
        "zeroed_share": pa.float64(),
    }
)


@dataclass(frozen=True)
class AnsweringPlan:
    """How arms answer: what has to be the same for all of them, and for a run that goes on.

    Attributes:
        batch_tokens: Tokens of one forward pass.
        reading: How prompts are read.
        resumable: Layers where a forward pass may begin, so that masks share what lies below their first head.
    """

    batch_tokens: int
    reading: Reading
    resumable: frozenset[int] = frozenset()


@dataclass
class ArmAnswers:
    """What an arm has answered so far, by the request's hash.

    Attributes:
        zeroed: The share of heads that was ablated in it, 0 to 1.
        missing: Indices of the items that it has not answered.
    """

    arm: Arm
    arm_id: str
    answers: dict[str, Likelihood | str] = field(default_factory=dict)
    zeroed: dict[str, float] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)

    def take(self, item: WorkItem, result: Result) -> None:
        """Add the answers to an item."""
        self.answers.update(zip(item.hashes, result.answers, strict=True))
        self.zeroed.update(zip(item.hashes, result.zeroed_shares, strict=True))
        self.missing.discard(item.index)

    def forget(self) -> None:
        """Let the answers go: a sweep has hundreds of arms."""
        self.answers, self.zeroed = {}, {}


Result = LikelihoodResult | GenerationResult


@dataclass(frozen=True)
class ArmsItem:
    """The work of some arms on one item; both are given by their index."""

    arms: tuple[int, ...]
    item: int
    work: BundleItem | LikelihoodItem | SharedRowItem | GenerationItem

    @property
    def name(self) -> str:
        return self.work.name


def answer_item(lm: LoadedModel, item: ArmsItem) -> Sequence[Result]:
    """A pool task: answer one item for each of its arms."""
    if isinstance(item.work, BundleItem):
        return score_bundle(lm, item.work)
    if isinstance(item.work, LikelihoodItem):
        return [score_requests(lm, item.work)]
    if isinstance(item.work, SharedRowItem):
        return [score_shared_rows(lm, item.work)]
    return [generate_texts(lm, item.work)]


def answer(
    store: Store,
    pool: Pool,
    arms: Sequence[tuple[Arm, str]],
    items: Sequence[WorkItem],
    plan: AnsweringPlan,
    *,
    title: str,
) -> Iterator[ArmAnswers]:
    """Let arms, given with their identity in the store, answer all items; yields each when it has.

    What an earlier run stored is not asked again. Items are whole or missing, so the batches, and with them every last
    digit, are those of an undisturbed run.
    """
    sheets = [_stored(store, arm, arm_id, items) for arm, arm_id in arms]
    total = sum(len(item.hashes) for item in items)
    left = sum(len(items[index].hashes) for sheet in sheets for index in sheet.missing)
    landing = _AnswerWriter(store)
    with Progress(title, total * len(arms), "requests") as progress:
        progress.skip(total * len(arms) - left)
        for sheet in sheets:
            if not sheet.missing:
                yield sheet
                sheet.forget()
        try:
            for indices, item, results in _answered(pool, _todo(sheets, items, plan)):
                for index, result in zip(indices, results, strict=True):
                    sheet = sheets[index]
                    sheet.take(items[item], result)
                    progress.update(len(items[item].hashes))
                    if sheet.missing:
                        landing.add(sheet, items[item])
                    else:
                        landing.drop(sheet)  # a finished arm is stored as a whole
                        yield sheet
                        sheet.forget()
                landing.land(at_least_after=_SECONDS_BETWEEN_WRITES)
        finally:
            landing.land()


def _answered(pool: Pool, todo: Iterator[ArmsItem]) -> Iterator[tuple[tuple[int, ...], int, Sequence[Result]]]:
    """What the pool gives: arms and item by their index, and the item's answers for each of the arms."""
    if pool.staged:
        alone = (_StagedItem(**vars(each.work), arms=each.arms, item=each.item) for each in todo)
        for scored in pool.map(score_in_ranges, alone):
            assert isinstance(scored.item, _StagedItem)
            yield scored.item.arms, scored.item.item, [scored.value]
    else:
        for finished in pool.map(answer_item, todo):
            yield finished.item.arms, finished.item.item, finished.value


@dataclass(frozen=True, kw_only=True)
class _StagedItem(LikelihoodItem):
    """The work of one arm on one item, as it goes through a model range by range of its layers."""

    arms: tuple[int, ...]
    item: int


def _todo(sheets: Sequence[ArmAnswers], items: Sequence[WorkItem], plan: AnsweringPlan) -> Iterator[ArmsItem]:
    for group in bundle([sheet.arm.ablated for sheet in sheets], plan.resumable):
        for item in items:
            lacking = tuple(index for index in group if item.index in sheets[index].missing)
            if item.scored and len(lacking) > 1:
                yield ArmsItem(lacking, item.index, _together([sheets[index].arm for index in lacking], item, plan))
            else:
                for index in lacking:
                    yield ArmsItem((index,), item.index, _alone(sheets[index].arm, item, plan))


def _alone(arm: Arm, item: WorkItem, plan: AnsweringPlan) -> LikelihoodItem | SharedRowItem | GenerationItem:
    name = f"{arm.name}, requests {item.index}"
    if item.scored:
        return plan.reading.item(name, item.scored, arm.ablated, plan.batch_tokens)
    return GenerationItem(name, item.written, arm.ablated, plan.batch_tokens, one_by_one=plan.reading.as_rules)


def _together(arms: Sequence[Arm], item: WorkItem, plan: AnsweringPlan) -> BundleItem:
    masks = tuple(arm.ablated for arm in arms)
    resume_layers = tuple(resume_layer(mask, plan.resumable) or 0 for mask in masks)
    name = f"{arms[0].name} and {len(arms) - 1} more, requests {item.index}"
    return BundleItem(name, item.scored, masks, resume_layers, plan.batch_tokens, plan.reading.share_prefixes)


class _AnswerWriter:
    """Answers on their way into the store, of arms that are not finished."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, tuple[ArmAnswers, list[str]]] = {}
        self._written = time.monotonic()

    def add(self, sheet: ArmAnswers, item: WorkItem) -> None:
        self._waiting.setdefault(sheet.arm_id, (sheet, []))[1].extend(item.hashes)

    def drop(self, sheet: ArmAnswers) -> None:
        self._waiting.pop(sheet.arm_id, None)

    def land(self, *, at_least_after: float = 0.0) -> None:
        """Store what waits, unless the last time was less than so many seconds ago."""
        if time.monotonic() - self._written < at_least_after:
            return
        for sheet, hashes in self._waiting.values():
            # Another process may have finished the arm meanwhile: it has the same answers.
            with suppress(FinishedArmError):
                self._store.add_responses(sheet.arm_id, _response_table(sheet, hashes))
        self._waiting.clear()
        self._written = time.monotonic()


def _response_table(done: ArmAnswers, hashes: Sequence[str]) -> pa.Table:
    rows = []
    for found in hashes:
        answer = done.answers[found]
        columns = {"text": answer} if isinstance(answer, str) else answer._asdict()
        rows.append({"request": found, "zeroed_share": done.zeroed[found], **columns})
    return pa.Table.from_pylist(rows, schema=_RESPONSES)


def _stored(store: Store, arm: Arm, arm_id: str, items: Sequence[WorkItem]) -> ArmAnswers:
    sheet = ArmAnswers(arm, arm_id)
    for row in store.responses(arm_id).to_pylist():
        sheet.answers[row["request"]] = _answer(row)
        sheet.zeroed[row["request"]] = row["zeroed_share"]
    sheet.missing = {item.index for item in items if not sheet.answers.keys() >= set(item.hashes)}
    return sheet


def _answer(row: Mapping[str, object]) -> Likelihood | str:
    if row["text"] is not None:
        return str(row["text"])
    return Likelihood(row["log_likelihood"], row["greedy_tokens"])  # type: ignore[arg-type]
