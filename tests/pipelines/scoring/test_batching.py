"""Batches that run out of memory are halved, and their size is not tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headscan.cluster.tasks.pool import StagedTask, run_pass
from headscan.errors import MemoryLimitError
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import MemoryLimit, run_halving
from headscan.pipelines.scoring.token_requests import Batch
from tests.small_models import make_loaded

LENGTHS = [10, 10, 9, 8, 20, 20, 3]


def scarce(most: int, tried: list[list[int]]):  # type: ignore[no-untyped-def]
    """Work on a batch that fits if it has at most so many tokens."""

    def run(batch: list[int]) -> int:
        tried.append(batch)
        if len(batch) * max(LENGTHS[index] for index in batch) > most:
            raise torch.OutOfMemoryError("as if")
        return len(batch)

    return run


def test_sizes_that_ran_out_are_halved_at_once() -> None:
    limit, tried = MemoryLimit(), []
    assert run_halving([0, 1, 2, 3], scarce(20, tried), LENGTHS, limit) == [([0, 1], 2), ([2, 3], 2)]
    assert tried == [[0, 1, 2, 3], [0, 1], [2, 3]]
    tried.clear()
    assert run_halving([4, 5], scarce(20, tried), LENGTHS, limit) == [([4], 1), ([5], 1)]
    assert tried == [[4], [5]]
    tried.clear()
    run_halving([2, 3, 6], scarce(20, tried), LENGTHS, limit)  # 27 tokens have not been seen to run out
    assert tried == [[2, 3, 6], [2], [3, 6]]
    tried.clear()
    run_halving([0, 1, 6], scarce(20, tried), LENGTHS, limit)
    assert tried == [[0], [1, 6]]


def test_a_single_sequence_is_always_tried() -> None:
    limit, tried = MemoryLimit(), []
    with pytest.raises(MemoryLimitError):
        run_halving([4], scarce(15, tried), LENGTHS, limit)
    with pytest.raises(MemoryLimitError):
        run_halving([4, 5], scarce(15, tried), LENGTHS, limit)
    assert tried == [[4], [4, 5], [4]]


class _Count(StagedTask[None, Batch, int, int]):
    """Adds up sequences; 16 tokens fit."""

    def passes(self, item: None) -> list[Batch]:
        return [Batch((0, 1, 2, 3), 8)]

    def size(self, part: Batch) -> int:
        return part.tokens

    def run(self, lm: LoadedModel, item: None, part: Batch) -> int:
        self.tried.append(len(part))  # type: ignore[attr-defined]
        if part.tokens > 16:
            raise torch.OutOfMemoryError("as if")
        return len(part)

    def halves(self, part: Batch) -> tuple[Batch, ...]:
        return part.halves()

    def join_halves(self, halves):  # type: ignore[no-untyped-def]
        return sum(halves)

    def join(self, item, partials):  # type: ignore[no-untyped-def]
        return sum(sum(ranges) for ranges in partials)


def test_a_loaded_model_remembers_for_all_its_sites() -> None:
    lm, task = make_loaded("llama"), _Count("count")
    task.tried = []  # type: ignore[attr-defined]
    assert task(lm, None) == 4
    assert run_pass(task, lm.at("self"), None, Batch((0, 1, 2, 3), 8)) == (4, None)
    assert task.tried == [4, 2, 2, 2, 2]  # type: ignore[attr-defined]
    other = replace(lm, limits=make_loaded("llama").limits)
    task(other, None)
    assert task.tried[5:] == [4, 2, 2]  # type: ignore[attr-defined]
