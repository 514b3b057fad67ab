"""Causal attention that computes the entropy of its weights in the same pass as the output, in Triton.

    python -m tests.benchmarks.entropy_kernel --device cuda
    TRITON_INTERPRET=1 python -m tests.benchmarks.entropy_kernel

The command compares the kernel with float64 and prints the largest differences by shape; with ``TRITON_INTERPRET=1``
the kernel runs in Triton's interpreter on the CPU. It is a candidate that `entropy_ways` times, no part of headscan.

As in FlashAttention, a program reads the keys block by block and keeps, for each of its queries, the largest score so
far and the sums over the keys so far of ``2^x`` and ``2^x v``, where ``x`` is a score in powers of two minus the
largest. A third sum, that of ``2^x x``, gives the entropy as in `headscan.attention.fused`. The weight on the first key
follows from its score.

Shapes: B sequences, N tokens, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.benchmarks.measuring import Table, device_of, parser_of, show

#: Queries and keys of a block.
BLOCKS = (128, 64)
#: Smallest width of an operand of a matrix product in Triton.
_LEAST_WIDTH = 16


class EntropyCall(NamedTuple):
    """The output (B, H, N, D) in the dtype of the query; log-sum-exp of the scores, entropy of the weights and weight
    on the first key, float32 (B, H, N).
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor
    first_weight: Tensor


@triton.jit
def _add_keys(
    query_MD, keys, values, acc_MD, largest_M, sums_M, products_M, start, stop, row_M, tokens, scale,
    stride_kn, stride_vn,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums with the keys from ``start`` to ``stop`` added; ``MASKED`` hides those after the query's own."""
    width_D = tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        key_N = first + tl.arange(0, BLOCK_N)
        is_real_ND = (key_N < tokens)[:, None] & (width_D < WIDTH)[None, :]
        at_ND = width_D[None, :]
        key_ND = tl.load(keys + key_N[:, None] * stride_kn + at_ND, mask=is_real_ND, other=0.0)
        scores_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision=PRECISION) * scale
        if MASKED:
            scores_MN = tl.where(key_N[None, :] <= row_M[:, None], scores_MN, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(scores_MN, 1))
        x_MN = scores_MN - new_largest_M[:, None]
        weights_MN = tl.exp2(x_MN)
        shift_M = largest_M - new_largest_M
        share_M = tl.exp2(shift_M)
        if MASKED:  # the weight of a hidden key is 0, and 0 times minus infinity would be NaN
            x_MN = tl.where(key_N[None, :] <= row_M[:, None], x_MN, 0.0)
        products_M = share_M * (products_M + shift_M * sums_M) + tl.sum(weights_MN * x_MN, 1)
        sums_M = share_M * sums_M + tl.sum(weights_MN, 1)
        value_ND = tl.load(values + key_N[:, None] * stride_vn + at_ND, mask=is_real_ND, other=0.0)
        acc_MD = acc_MD * share_M[:, None]
        acc_MD += tl.dot(weights_MN.to(value_ND.dtype), value_ND, input_precision=PRECISION)
        largest_M = new_largest_M
    return acc_MD, largest_M, sums_M, products_M


@triton.jit
def _kernel(
    query, key, value, output, lse, entropy, first_weight, heads, tokens, scale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for one block of queries of one head."""
    # Later queries read more keys, so their blocks start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    keys = key + sequence.to(tl.int64) * stride_kb + (head // GROUP).to(tl.int64) * stride_kh
    values = value + sequence.to(tl.int64) * stride_vb + (head // GROUP).to(tl.int64) * stride_vh
    queries = query + sequence.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    outputs = output + sequence.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    width_D = tl.arange(0, BLOCK_D)
    is_real_MD = (row_M < tokens)[:, None] & (width_D < WIDTH)[None, :]
    query_MD = tl.load(queries + row_M[:, None] * stride_qn + width_D[None, :], mask=is_real_MD, other=0.0)
    first_D = tl.load(keys + width_D, mask=width_D < WIDTH, other=0.0)
    first_score_M = tl.sum(query_MD.to(tl.float32) * first_D.to(tl.float32)[None, :], 1) * scale

    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    largest_M = tl.full([BLOCK_M], -1e30, dtype=tl.float32)  # finite: a difference of two infinities is NaN
    sums_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    products_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Every query of the block sees the keys before `seen_by_all`, so these need no mask.
    seen_by_all = (block * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum((block + 1) * BLOCK_M, tokens)
    acc_MD, largest_M, sums_M, products_M = _add_keys(
        query_MD, keys, values, acc_MD, largest_M, sums_M, products_M, 0, seen_by_all, row_M, tokens, scale,
        stride_kn, stride_vn, WIDTH, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc_MD, largest_M, sums_M, products_M = _add_keys(
        query_MD, keys, values, acc_MD, largest_M, sums_M, products_M, seen_by_all, stop, row_M, tokens, scale,
        stride_kn, stride_vn, WIDTH, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip

    log_sums_M = tl.log2(sums_M)
    at_M = tl.program_id(1).to(tl.int64) * tokens + row_M
    is_row_M = row_M < tokens
    LN2: tl.constexpr = 0.6931471805599453
    tl.store(lse + at_M, LN2 * (largest_M + log_sums_M), mask=is_row_M)
    tl.store(entropy + at_M, tl.maximum(LN2 * (log_sums_M - products_M / sums_M), 0.0), mask=is_row_M)
    tl.store(first_weight + at_M, tl.exp2(first_score_M - largest_M - log_sums_M), mask=is_row_M)
    out_MD = (acc_MD / sums_M[:, None]).to(output.dtype.element_ty)
    tl.store(outputs + row_M[:, None] * stride_on + width_D[None, :], out_MD, mask=is_real_MD)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: tuple[int, int] = BLOCKS, warps: int = 8
) -> EntropyCall:
    """Return causal attention of queries (B, H, N, D) on keys and values (B, K, N, D) of whole sequences."""
    B, H, N, D = query.shape
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Stored as (B, N, H, D), as models transpose it next.
    output = query.new_empty(B, N, H, D).transpose(1, 2)
    lse, entropy, first_weight = torch.empty(3, B, H, N, dtype=torch.float32, device=query.device)
    block_queries, block_keys = blocks
    _kernel[triton.cdiv(N, block_queries), B * H](
        query, key, value, output, lse, entropy, first_weight, H, N, scale / math.log(2),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        GROUP=H // key.shape[1],
        WIDTH=D,
        BLOCK_D=max(_LEAST_WIDTH, triton.next_power_of_2(D)),
        BLOCK_M=block_queries,
        BLOCK_N=block_keys,
        PRECISION="ieee",  # without it, products of float32 are rounded to TF32
        num_warps=warps,
    )  # fmt: skip
    return EntropyCall(output, lse, entropy, first_weight)


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> EntropyCall:
    """Return the same from all weights in float64, on the CPU."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (x.cpu().double() for x in (query, key, value))
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = scale * query @ key.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    return EntropyCall(weights @ value, scores.logsumexp(-1), entropy, weights[..., 0])


#: Shapes to check: B, H, K, N, D, standard deviation of the scores, and what the first key's score has in addition.
SHAPES = (
    (1, 1, 1, 1, 16, 1.0, 0.0),
    (2, 2, 1, 128, 64, 1.0, 0.0),
    (1, 4, 2, 150, 64, 3.0, 0.0),
    (1, 2, 2, 100, 96, 1.0, 0.0),
    (1, 2, 1, 200, 128, 1.0, 8.0),
    (1, 1, 1, 65, 128, 10.0, 0.0),
    (1, 1, 1, 320, 128, 0.1, 30.0),
)
#: One more for a device; the interpreter would take minutes.
_LONG = (1, 8, 2, 2048, 128, 1.0, 4.0)
#: Largest differences from float64: of the output by dtype, as parts of its largest value; and of the other numbers, as
#: parts of the largest log-sum-exp, because float32 rounds a large score more.
_OUTPUT_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_NUMBER_BOUND = 1e-5
COLUMNS = (
    "B, H, K, N, D",
    "scores",
    "first key",
    "dtype",
    "blocks",
    "output",
    "log-sum-exp",
    "entropy",
    "first weight",
)


def inputs(
    shape: tuple[int, int, int, int, int, float, float], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return random queries, keys, values, and the scale of the scores."""
    B, H, K, N, D, spread, sink = shape
    generator = torch.Generator().manual_seed(0)
    # The memory layout of a model's projections.
    query, key, value = (torch.randn(B, N, count, D, generator=generator).transpose(1, 2) for count in (H, K, K))
    key = spread * key
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, :, 0, 0] = sink * math.sqrt(D)
    return *(x.to(device, dtype) for x in (query, key, value)), D**-0.5


def check_rows(device: torch.device) -> Iterator[tuple[tuple[object, ...], list[str]]]:
    """Yield the cells of `COLUMNS`, and which numbers differ too much, in words."""
    # Triton's interpreter multiplies the bit patterns of bfloat16.
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    for shape in (*SHAPES, _LONG) if device.type == "cuda" else SHAPES:
        for dtype, blocks in ((torch.float32, (64, 32)), (torch.float32, (32, 64)), (half, BLOCKS)):
            query, key, value, scale = inputs(shape, dtype, device)
            found = attend(query, key, value, scale, blocks)
            differences, wrong = [], []
            exact = expected(query, key, value, scale)
            for name, ours, right in zip(EntropyCall._fields, found, exact, strict=True):
                difference = float((ours.cpu().double() - right).abs().max())
                bound = _OUTPUT_BOUNDS[dtype] if name == "output" else _NUMBER_BOUND
                largest = exact.output if name == "output" else exact.lse
                limit = bound * max(1.0, float(largest.abs().max()))
                differences.append(f"{difference:.1e}")
                if not difference <= limit:
                    wrong.append(f"{name} of {shape}, {dtype}, {blocks}: {difference:.1e} (limit {limit:.1e})")
            *sizes, spread, sink = shape
            about = (", ".join(map(str, sizes)), spread, sink, str(dtype).partition(".")[2], "{} x {}".format(*blocks))
            yield (*about, *differences), wrong


def main() -> None:
    """Compare the kernel with float64; a difference that is too large ends the command with an error."""
    device = device_of(parser_of(__doc__).parse_args())
    table = Table("## The kernel's largest differences from float64", COLUMNS)
    problems: list[str] = []
    for cells, wrong in check_rows(device):
        table.row(*cells)
        problems += wrong
    for problem in problems:
        show(f"Too large: {problem}")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
