"""Attention of windowed KV heads without the gap: tensors alone, nothing here imports vLLM.

A kernel reads the keys of a sequence in the order of its block table, and a query sees all of them up to its own. So a
window is a shorter table: the blocks of the first tokens, then those of the window. Queries whose windows start at the
same block are one sequence for the kernel, a segment; a step with a long prompt has several segments of a request.

Shapes: R requests, V segments, T blocks of a request, W blocks of a window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headscan_vllm.served_plan import WindowRule


class Segments(NamedTuple):
    """Sequences for a kernel.

    Attributes:
        query_start: First query of each segment, and the number of queries at the end, (V + 1,).
        lengths: Keys of each segment, (V,); 0 without queries.
        requests: Request of each segment, (V,).
        blocks: Places in the request's table of the blocks in the segment's own, (V, W).
    """

    query_start: Tensor
    lengths: Tensor
    requests: Tensor
    blocks: Tensor

    def table(self, block_table: Tensor) -> Tensor:
        """Return the blocks of each segment, (V, W), from those of the requests, (R, T)."""
        return block_table[self.requests].gather(1, self.blocks)


def segment_count(query_lengths: Tensor, chunk: int) -> int:
    """Return a number of segments that is enough wherever the queries of the requests, (R,), lie. It is R if no request
    has several.
    """
    longer = (query_lengths > 1) * ((query_lengths - 2).clamp(min=0) // chunk + 1)
    return int(query_lengths.shape[0] + longer.sum())


def segments(
    query_start: Tensor, lengths: Tensor, width: int, rule: WindowRule, *, block_size: int, count: int
) -> Segments:
    """Return the segments of a step. The device is never waited for: all sizes follow from the arguments.

    Args:
        query_start: First query of each request, and the number of queries at the end, (R + 1,).
        lengths: Keys of each request, those of the queries included, (R,).
        width: Blocks in the requests' table, T.
        block_size: Tokens of a block of that table, which divides ``rule.block``.
        count: `segment_count` of the same requests.
    """
    R = lengths.shape[0]
    query_start, lengths = query_start.long(), lengths.long()
    queries = query_start[1:] - query_start[:-1]
    computed = lengths - queries
    if count == R:
        requests = torch.arange(R, device=lengths.device)
        place = torch.zeros_like(requests)
    else:
        counts = 1 + (queries > 1) * ((queries - 2).clamp(min=0) // rule.chunk + 1)
        requests = torch.repeat_interleave(counts, output_size=count)
        place = torch.arange(count, device=lengths.device) - (counts.cumsum(0) - counts)[requests]
    chunk_start = ((computed[requests] - rule.offset) // rule.chunk + place) * rule.chunk + rule.offset
    end = torch.minimum(chunk_start + rule.chunk, lengths[requests])
    first_query = query_start[requests] + (chunk_start - computed[requests]).clamp(min=0).minimum(queries[requests])
    starts = torch.cat([first_query, query_start[-1:]])
    window = ((chunk_start - rule.recent + 1).div(rule.block, rounding_mode="floor") * rule.block).clamp(min=rule.sink)
    gap = window - rule.sink
    has_queries = starts[1:] > starts[:-1]
    kept = torch.where(has_queries, end - gap, 0)

    at = torch.arange(most_blocks(width, rule, block_size), device=lengths.device)
    blocks = torch.where(at < rule.sink // block_size, at, at + gap[:, None] // block_size).clamp(max=width - 1)
    return Segments(starts.int(), kept.int(), requests, blocks)


def most_blocks(width: int, rule: WindowRule, block_size: int) -> int:
    """Return the blocks in the table of a segment, of which a request's table has ``width``."""
    return min(width, -(-rule.most_tokens // block_size))
