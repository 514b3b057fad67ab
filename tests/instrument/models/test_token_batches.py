"""Batches keep rotary frequencies apart. Those that run out of memory are halved, and their size is not tried again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headscan.errors import MemoryLimitError
from headscan.models.model_facts import RopeLengths
from headscan.models.token_batches import MemoryLimit, batches, pad, run_halving, run_halving_by_size, whole_batches
from tests.rope_models import LIMIT

#: On both sides of the limit.
MIXED = (120, 10, 64, 65, 120, 63, 90, 3, 66, 90)
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


def test_a_caller_can_measure_batches_in_another_way() -> None:
    limit, tried = MemoryLimit(), []
    limit.ran_out(40)
    run_halving([4, 5], scarce(40, tried), LENGTHS, limit)
    assert tried == [[4], [5]]
    tried.clear()

    def shared_tokens(indices: list[int]) -> int:
        """The first 15 tokens are held once."""
        return 15 + sum(LENGTHS[index] - 15 for index in indices)

    run_halving_by_size([4, 5], scarce(40, tried), shared_tokens, limit)
    assert tried == [[4, 5]]


def test_batches_keep_groups_apart() -> None:
    rope = RopeLengths(switches=(LIMIT,))
    found = whole_batches(MIXED, 10_000, rope.group)
    sides = [sorted(MIXED[row] for row in batch.sequence_indices) for batch in found]
    assert sides == [[65, 66, 90, 90, 120, 120], [3, 10, 63, 64]]
    dynamic = whole_batches(MIXED, 10_000, RopeLengths(scaled_above=LIMIT).group)
    assert sorted(len(batch) for batch in dynamic) == [1, 1, 2, 2, 4]
    assert whole_batches(MIXED, 10_000, RopeLengths().group) == [
        replace(found[0], sequence_indices=(0, 4, 6, 9, 8, 3, 2, 5, 1, 7))
    ]
    assert list(batches([4, 4, 4], 100, groups=["a", "b", "b"])) == [[0], [1, 2]]


def test_sequences_are_padded_on_the_right() -> None:
    sequences = [(5, 6), np.array([7, 8, 9], dtype=np.int32)]
    ids, lengths = pad(sequences)
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]] and ids.dtype == torch.long and lengths.tolist() == [2, 3]
    assert pad(sequences, 4)[0].tolist() == [[5, 6, 0, 0], [7, 8, 9, 0]]
