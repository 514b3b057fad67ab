"""Block tables without the gap, against the rule of each query written out key by key. vLLM is not needed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from headscan_vllm.segments import Segments, most_blocks, segment_count, segments
from headscan_vllm.served_plan import WindowRule
from torch import Tensor

WIDTH = 40


def seen_by(rule: WindowRule, position: int) -> list[int]:
    """Return the keys that a query sees, as the documentation of plans in vLLM defines them."""
    before = position - (position - rule.offset) % rule.chunk - rule.recent + 1
    start = before - before % rule.block
    return [key for key in range(position + 1) if key < rule.sink or key >= start]


def made(computed: Sequence[int], queries: Sequence[int], rule: WindowRule, block_size: int) -> Segments:
    lengths = torch.tensor([sum(pair) for pair in zip(computed, queries, strict=True)], dtype=torch.int32)
    counts = torch.tensor(queries, dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
    count = segment_count(counts, rule.chunk)
    return segments(starts, lengths, WIDTH, rule, block_size=block_size, count=count)


def keys_of_queries(found: Segments, table: Tensor, block_size: int) -> dict[int, list[int]]:
    """Return the slots that a causal kernel reads for each query: the last query of a segment sees all its keys."""
    read = {}
    for place, blocks in enumerate(found.table(table).tolist()):
        first, end = found.query_start[place : place + 2].tolist()
        for query in range(first, end):
            count = int(found.lengths[place]) - (end - 1 - query)
            read[query] = [blocks[key // block_size] * block_size + key % block_size for key in range(count)]
    return read


@pytest.mark.parametrize("seed", range(60))
def test_each_query_reads_the_keys_of_its_rule_in_order(seed: int) -> None:
    draw = random.Random(seed)
    block_size = draw.choice([2, 4])
    block = block_size * draw.choice([1, 2])
    chunk, sink, recent = block * draw.choice([1, 2, 3]), block * draw.choice([0, 1, 2]), draw.randint(1, 20)
    rule = draw.choice([WindowRule(sink, recent, block, chunk), WindowRule.of_tokens(sink, recent, block)])
    requests = draw.randint(1, 4)
    computed = [draw.randint(0, 40) for _ in range(requests)]
    queries = [draw.choice([0, 1, 1, 2, 7, draw.randint(1, 38)]) for _ in range(requests)]
    table = torch.randperm(requests * WIDTH).view(requests, WIDTH).int()
    found = made(computed, queries, rule, block_size)
    read = keys_of_queries(found, table, block_size)
    first = 0
    for row, before, count in zip(table.tolist(), computed, queries, strict=True):
        for query in range(count):
            seen = seen_by(rule, before + query)
            assert read.pop(first + query) == [row[k // block_size] * block_size + k % block_size for k in seen]
            assert len(seen) <= rule.most_tokens
            assert rule.start(before + query) == max(sink, min((k for k in seen if k >= sink), default=sink))
        first += count
    assert not read and found.blocks.shape[1] == most_blocks(WIDTH, rule, block_size)
    assert found.lengths.dtype == found.query_start.dtype == torch.int32


@pytest.mark.parametrize("recent", range(1, 14))
def test_without_a_chunk_each_query_has_its_own_window_in_whole_blocks(recent: int) -> None:
    rule = WindowRule.of_tokens(4, recent, 4)
    for position in range(50):
        expected = {key for key in range(position + 1) if key < 4 or key // 4 >= (position - recent + 1) // 4}
        assert set(seen_by(rule, position)) == expected


def test_a_step_of_single_tokens_has_a_segment_for_each_request() -> None:
    rule = WindowRule(4, 9, 4, 8)
    found = made([0, 30, 77], [1, 1, 1], rule, 4)
    assert found.requests.tolist() == [0, 1, 2] and found.query_start.tolist() == [0, 1, 2, 3]
    assert found.lengths.tolist() == [len(seen_by(rule, position)) for position in (0, 30, 77)] == [1, 19, 18]


def test_attention_over_the_segments_equals_masked_attention() -> None:
    rule, block_size, computed, queries = WindowRule(4, 6, 4, 8), 4, 13, 17
    total = computed + queries
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(queries, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, WIDTH * block_size, 8, generator=generator, dtype=torch.float64)
    table = torch.randperm(WIDTH, generator=generator)[None].int()
    slots = torch.tensor([int(table[0, key // block_size]) * block_size + key % block_size for key in range(total)])
    scores = query @ keys[slots].T
    mask = torch.tensor([[key in seen_by(rule, computed + at) for key in range(total)] for at in range(queries)])
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[slots]
    read = keys_of_queries(made([computed], [queries], rule, block_size), table, block_size)
    found = torch.stack([(query[at] @ keys[read[at]].T).softmax(-1) @ values[read[at]] for at in range(queries)])
    assert (found - expected).abs().max() < 1e-12


def test_no_size_depends_on_numbers_of_the_device() -> None:
    """Tensors on the meta device have no numbers, so reading one, which would wait for a GPU, raises."""
    rule = WindowRule(4, 9, 4, 8)
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    for count in (3, 9):
        found = segments(starts, lengths, WIDTH, rule, block_size=4, count=count)
        assert found.lengths.shape == (count,) and found.query_start.shape == (count + 1,)
        assert found.table(torch.empty(3, WIDTH, dtype=torch.int32, device="meta")).shape == (count, 5)
