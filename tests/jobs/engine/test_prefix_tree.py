"""Prefixes are shared and grouped rightly, where that pays, and items of work do not hang on the order of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

import pytest

from headscan.engine.answering import request_chunks
from headscan.texts.prefix_tree import PrefixNode, common_tokens, join_similar, prefix_tree
from headscan.texts.token_requests import GenerationRequest, Request, request_hash

Tokens = tuple[int, ...]


def walked(root: PrefixNode) -> Iterator[tuple[list[PrefixNode], Tokens]]:
    """Every node, at the end of the path that leads to it, and all tokens of that path."""
    todo: list[tuple[list[PrefixNode], Tokens]] = [([root], ())]
    while todo:
        path, tokens = todo.pop()
        yield path, tokens
        todo += [([*path, child], tokens + child.tokens[0]) for child in path[-1].children]


def random_sequences(random: Random) -> list[Tokens]:
    """Sequences that begin with each other's beginnings, some of them twice."""
    found: list[Tokens] = [()]
    for _ in range(random.randint(1, 30)):
        beginning = random.choice(found)
        cut = random.randint(0, len(beginning))
        found.append(beginning[:cut] + tuple(random.choices(range(3), k=random.randint(0, 12))))
    return found[1:]


def check(sequences: Sequence[Tokens], shareable: Sequence[int], pass_cost: int) -> PrefixNode:
    """All that holds of a tree of prefixes."""
    root = prefix_tree(sequences, shareable, pass_cost)
    assert (root.start, root.tokens) == (0, [])
    rows: list[int] = []
    below: Counter[int] = Counter()
    inner = []
    for path, tokens in walked(root):
        node = path[-1]
        assert node.end == len(tokens)
        inner += [node] if node.tokens else []
        of_node = [row for row, _ in node.sequences]
        rows += of_node
        below.update({id(above): len(node.sequences) for above in path})
        for row in of_node:
            assert sequences[row][: node.end] == tokens
            assert node.end <= shareable[row]
        for a, b in combinations(of_node, 2):  # sharing more between two would not pay
            assert common_tokens(sequences, shareable, a, b) - node.end <= pass_cost
    assert sorted(rows) == list(range(len(sequences)))
    for node in inner:
        assert (below[id(node)] - 1) * len(node.tokens[0]) > pass_cost
    return root


def test_every_sequence_is_read_once_and_nothing_is_shared_that_does_not_pay() -> None:
    for seed in range(200):
        random = Random(seed)
        sequences = random_sequences(random)
        shareable = [random.randint(0, len(tokens)) for tokens in sequences]
        check(sequences, shareable, random.choice([0, 1, 4, 20]))


def test_a_prefix_is_shared_as_soon_as_it_saves_more_than_a_pass() -> None:
    sequences = [(1, 2, 3, 4, n) for n in range(3)]  # two of three need not read four tokens
    assert [child.tokens for child in check(sequences, [4] * 3, 7).children] == [[(1, 2, 3, 4)]]
    assert check(sequences, [4] * 3, 8).children == []
    (child,) = check(sequences, [4, 2, 4], 0).children
    assert (child.tokens, child.sequences) == ([(1, 2)], [(1, 0)])
    assert [inner.tokens for inner in child.children] == [[(3, 4)]]


def test_trees_may_be_empty_and_deeper_than_the_stack() -> None:
    sequences = [tuple(range(length)) for length in range(1, 1501)]
    root = prefix_tree(sequences, [len(tokens) for tokens in sequences], 0)
    found = 0
    while root.children:
        (root,) = root.children
        found += 1
    assert found == 1499
    assert root.end == 1499
    assert prefix_tree([], [], 0) == PrefixNode(0, [])


# Items of work


def random_requests(seed: int) -> dict[str, Request | GenerationRequest]:
    random = Random(seed)
    found: list[Request | GenerationRequest] = [
        Request((*tokens, 1, 2), random.randint(1, 2)) for _ in range(5) for tokens in random_sequences(random)
    ]
    found += [
        GenerationRequest((*tokens, 1), ("\n",), random.choice([4, 8]), (("do_sample", True),), draw)
        for tokens in random_sequences(random)
        for draw in range(2)
    ]
    return {request_hash(request): request for request in found}


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_items_hold_every_request_once_with_its_hash(batch_tokens: int) -> None:
    requests = random_requests(0)
    items = request_chunks(requests, batch_tokens)
    assert [item.index for item in items] == list(range(len(items)))
    assert Counter(found for item in items for found in item.hashes) == Counter(list(requests))
    for item in items:
        assert len({type(request) for request in item.requests}) == 1
        assert [requests[found] for found in item.hashes] == [*item.requests]


def test_items_do_not_depend_on_the_order_of_requests_and_hold_common_prefixes() -> None:
    requests = random_requests(1)
    items = request_chunks(requests, 40)
    assert len(items) > 5
    for seed in range(5):
        shuffled = Random(seed).sample(list(requests), len(requests))
        assert request_chunks({found: requests[found] for found in shuffled}, 40) == items
    beginnings = [(n,) * 20 for n in range(8)]
    requests = {request_hash(r): r for b in beginnings for n in range(4) for r in [Request((*b, n, n), 1)]}
    shuffled = Random(0).sample(list(requests), len(requests))
    items = request_chunks({found: requests[found] for found in shuffled}, 28)
    # 22 tokens for the first of a kind, one or two for each of the others.
    assert [len({request.ids[:20] for request in item.requests}) for item in items] == [1] * 8


def test_hashes_distinguish_requests_and_are_equal_in_every_process() -> None:
    requests = [
        Request((1, 2, 3), 1),
        Request((1, 2, 3), 2),
        Request((1, 2), 1),
        GenerationRequest((1, 2, 3), (), 1, ()),
        GenerationRequest((1, 2, 3), ("\n",), 1, ()),
        GenerationRequest((1, 2, 3), (), 1, (), 1),
        GenerationRequest((1, 2, 3), (), 1, (("top_k", 2),)),
    ]
    assert len({request_hash(request) for request in requests}) == len(requests)
    assert request_hash(requests[0]) == "d60e0d742c92ab86c67910d2ada4707b"


def grouped(sequences: Sequence[Tokens], cost: int, most: int) -> PrefixNode:
    root = prefix_tree(sequences, [len(tokens) for tokens in sequences], cost)
    join_similar(root, cost, most)
    return root


def walked_groups(group: PrefixNode, before: Tokens = ()) -> Iterator[tuple[PrefixNode, list[Tokens]]]:
    """Every group, and its whole prefixes."""
    prefixes = [(*before, *tokens) for tokens in group.tokens] or [before]
    yield group, prefixes
    for child in group.children:
        assert len(prefixes) == 1, "longer prefixes continue one"
        yield from walked_groups(child, prefixes[0])


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_continues_its_own_prefix(seed: int) -> None:
    random = Random(seed)
    sequences = random_sequences(random)
    cost, most = random.randint(0, 6), random.choice([1, 20, 60, 1000])
    found: list[int] = []
    for group, prefixes in walked_groups(grouped(sequences, cost, most)):
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
