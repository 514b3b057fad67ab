"""Groups of prefixes: every sequence continues its own prefix, and no group costs more than it saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from headscan.texts.prefix_tree import PrefixNode, join_similar, prefix_tree
from tests.jobs.engine.test_prefix_tree import Tokens, random_sequences


def grouped(sequences: Sequence[Tokens], cost: int, most: int) -> PrefixNode:
    root = prefix_tree(sequences, [len(tokens) for tokens in sequences], cost)
    join_similar(root, cost, most)
    return root


def walked(group: PrefixNode, before: Tokens = ()) -> Iterator[tuple[PrefixNode, list[Tokens]]]:
    """Every group, and its whole prefixes."""
    prefixes = [(*before, *tokens) for tokens in group.tokens] or [before]
    yield group, prefixes
    for child in group.children:
        assert len(prefixes) == 1, "longer prefixes continue one"
        yield from walked(child, prefixes[0])


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_continues_its_own_prefix(seed: int) -> None:
    random = Random(seed)
    sequences = random_sequences(random)
    cost, most = random.randint(0, 6), random.choice([1, 20, 60, 1000])
    found: list[int] = []
    for group, prefixes in walked(grouped(sequences, cost, most)):
        assert {len(prefix) for prefix in prefixes} == {group.end}
        for row, index in group.sequences:
            assert sequences[row][: group.end] == prefixes[index]
        found += [row for row, _ in group.sequences]
        if len(prefixes) > 1:
            assert len(prefixes) * group.end <= most
    assert sorted(found) == list(range(len(sequences)))


def test_similar_prefixes_are_cut_to_one_length() -> None:
    prefixes = [tuple(range(100 * n, 100 * n + length)) for n, length in enumerate((50, 48, 47, 20), start=1)]
    sequences = [(*prefix, 9000 + n) for prefix in prefixes for n in range(4)]
    root = grouped(sequences, 30, 1000)
    assert [len(group.tokens) for group in root.children] == [3, 1]  # 27 tokens less would be read by 4 sequences each
    assert root.children[0].end == 47 and root.children[1].end == 20
    assert [len(group.tokens) for group in grouped(sequences, 30, 100).children] == [2, 1, 1]
    assert [len(group.tokens) for group in grouped(sequences, 30, 40).children] == [1, 1, 1, 1]
