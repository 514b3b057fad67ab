"""The device's fused kernels and identities, against explicit float64 weights.

Shapes: B sequences, N queries, S keys, R compared rows, H query heads, K KV heads, D and Dv widths of a key
and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headscan.attention import fused as identities
from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.calls import ScoredCall
from headscan.attention.kernels import CpuKernels, FusedKernels, kernels_for
from headscan.catalog import panel_names
from headscan.gpu_proof.checks import Check, Comparer, Difference
from headscan.statistics.registry import (
    CONTINUABLE,
    OUTPUT_STATISTICS,
    QUERY_NUMBERS,
    VALUE_STATISTICS,
    fused_numbers,
)

GROUP = "kernels"
HALF = (torch.bfloat16, torch.float16)
#: Chooses the kernels for a query, a width and a group size, as `kernels.kernels_for` does.
Choice = Callable[[Tensor, int, int], FusedKernels | None]

#: Largest error of a share (a weight, a mass), of a log-sum-exp, and of a norm: float32 sums in any order.
_SHARE = 1e-4
#: Largest error of numbers that the kernel rounds, in units of the dtype's epsilon: of one query, and of the mean.
_ROUNDED, _ROUNDED_MEAN = 6, 1
#: The same bound in float32, in which rounding errors of many numbers add up.
_SINGLE = 1e-5
_WIDTHS = MassWidths(sink=4, recent=48)
_WHOLE = frozenset(
    {"first_token_weight", "entropy", "weight_sum", "sink_mass", "recent_mass", "self_weight", "previous_token_weight"}
)
_AFTER_PAST = frozenset({"first_token_weight", "entropy"})
#: Largest number of rows with explicit weights; a longer sequence is sampled to about this number.
_MOST_ROWS, _SAMPLED = 1000, 64


@dataclass(frozen=True)
class Shape:
    """Inputs of an attention call.

    Attributes:
        sequences, heads, kv_heads, queries, keys, width, value_width: B, H, K, N, S, D and Dv.
        window: Keys that a query sees; None: all up to its own.
        sinks: Learned sink logits beside the keys.
        peaked: How strongly all queries are drawn to the first key.
    """

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    window: int | None = None
    sinks: bool = False
    peaked: float = 0.0

    def __str__(self) -> str:
        more = f", window {self.window}" * (self.window is not None) + ", sinks" * self.sinks
        more += ", sink-like" * bool(self.peaked)
        values = f"/{self.value_width}" * (self.value_width != self.width)
        return (
            f"{self.sequences} x {self.queries} queries on {self.keys} keys, heads {self.heads}/{self.kv_heads}, "
            f"width {self.width}{values}{more}"
        )

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return random queries, keys and values (B, heads, tokens, width)."""
        generator = torch.Generator().manual_seed(self.keys + self.width)

        def draw(heads: int, tokens: int, width: int) -> Tensor:
            return torch.randn(self.sequences, heads, tokens, width, generator=generator)

        query, key = draw(self.heads, self.queries, self.width), draw(self.kv_heads, self.keys, self.width)
        if self.peaked:
            direction = self.peaked * torch.nn.functional.normalize(torch.randn(self.width, generator=generator), dim=0)
            query, key[:, :, 0] = query + direction, direction
        value = draw(self.kv_heads, self.keys, self.value_width)
        return query.to(device, dtype), key.to(device, dtype), value.to(device, dtype)


def square(heads: int, kv_heads: int, tokens: int, width: int, value_width: int | None = None) -> Shape:
    """Return the inputs of two whole sequences."""
    return Shape(2, heads, kv_heads, tokens, tokens, width, value_width or width)


def behind(queries: int, keys: int, heads: int, kv_heads: int, width: int, sequences: int = 3) -> Shape:
    """Return the inputs of continuations: queries of the last tokens only."""
    return Shape(sequences, heads, kv_heads, queries, keys, width, width)


def kernel_checks(device: torch.device, *, small: bool, choose: Choice = kernels_for) -> list[Check]:
    """Return the checks of the kernels that ``choose`` returns on a device.

    Args:
        small: Fewer and shorter sequences, for a CPU.
        choose: The kernels that are checked.
    """
    dtypes = (torch.float32,) if device.type == "cpu" and choose is kernels_for else HALF
    tokens = (96, 150) if small else (384, 1000)
    many = 512 if small else 4096
    gqa, mha, mqa = square(8, 2, tokens[0], 64), square(4, 4, tokens[1], 128), square(6, 1, tokens[0], 32)
    plain = [gqa, mha, mqa, square(6, 2, tokens[0], 80), square(4, 2, tokens[1], 16), square(2, 2, 3, 64)]
    odd = [square(4, 2, tokens[0], 12), square(4, 1, 50, 20), square(6, 6, tokens[0], 12, 10), square(2, 2, 40, 4)]
    latent = [square(4, 4, tokens[0], 192, 128), square(4, 2, 70, 256), square(4, 2, 70, 64, 96)]
    windows = [replace(shape, window=window) for shape in (gqa, mqa) for window in (1, 7, 128, tokens[0] - 1)]
    sinks = [replace(shape, sinks=True, window=window) for shape in (gqa, mha) for window in (None, 40)]
    peaked = [replace(shape, peaked=8.0, window=window) for shape in (gqa, mqa) for window in (None, 64)]
    decode = [behind(1, keys, *heads) for keys in (1, 2, 129, many) for heads in ((8, 8, 64), (32, 8, 128), (6, 1, 64))]
    decode += [replace(shape, sequences=1) for shape in decode[-3:]]
    past = [behind(5, 300, 8, 2, 64), behind(140, 840 if not small else 200, 8, 2, 128), behind(17, many, 6, 1, 64, 1)]
    bands = [replace(shape, window=window) for shape in [*past, decode[-1]] for window in (1, 7, 130)]
    long = square(4, 2, 512 if small else 32768, 128)
    found = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")

        def add(title: str, shapes: Iterable[Shape], dtype: torch.dtype = dtype, name: str = name) -> None:
            run = partial(_check_shapes, choose, device, dtype, tuple(shapes))
            found.append(Check(GROUP, f"{name}: {title}", run))

        def also(title: str, run: Callable[..., Iterator[Difference]], name: str = name) -> None:
            found.append(Check(GROUP, f"{name}: {title}", run))

        also("fused kernels serve every width", partial(_check_served, choose, device, dtype))
        add("whole sequences", plain)
        add("widths that are no multiple of 8", odd)
        add("wide heads, values of another width", latent)
        add("windows", windows)
        add("learned sinks", sinks)
        add("a sink-like first key", peaked)
        add("one query on many keys", decode)
        add("some queries behind a past", past)
        add("windows behind a past", bands)
        add("long sequences, sampled rows", [replace(long, sequences=1), replace(long, sequences=1, window=500)])
        also("views, expanded and misaligned", partial(_check_layouts, choose, device, dtype))
        also("ragged lengths, all statistics", partial(_check_ragged, choose, device, dtype))
        also("a key that is not a number", partial(_check_nan, choose, device, dtype))
    return found


def _check_served(choose: Choice, device: torch.device, dtype: torch.dtype, compare: Comparer) -> Iterator[Difference]:
    """Check that kernels are available.

    On a GPU the blockwise path silently replaces a failed kernel.
    """
    for width in (8, 12, 16, 64, 80, 96, 128, 192, 256):
        for groups in (1, 4):
            query = torch.zeros(1, 2 * groups, 4, width, device=device, dtype=dtype)
            kernels = choose(query, width, groups)
            served = kernels is not None and (device.type == "cpu" or not isinstance(kernels, CpuKernels))
            yield compare.same(f"width {width}, groups of {groups}", torch.tensor([served]), torch.tensor([True]))


def _check_shapes(
    choose: Choice, device: torch.device, dtype: torch.dtype, shapes: Iterable[Shape], compare: Comparer
) -> Iterator[Difference]:
    for shape in shapes:
        query, key, value = shape.tensors(device, dtype)
        sinks = torch.linspace(-1, 3, shape.heads, device=device).view(1, -1, 1) if shape.sinks else None
        yield from _compare(choose, query, key, value, compare, str(shape), window=shape.window, sinks_BHN=sinks)


def _check_layouts(choose: Choice, device: torch.device, dtype: torch.dtype, compare: Comparer) -> Iterator[Difference]:
    for name, (query, key, value) in layouts(device, dtype).items():
        for queries in (1, 9, query.shape[2]):
            yield from _compare(choose, query[:, :, -queries:], key, value, compare, f"{name}, {queries} queries")


def layouts(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values in the memory layouts of models.

    Queries are (2, 4, 40, 16), keys and values (2, 2, 40, 16).
    """
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    fused, latent = draw(2, 40, 8, 16).transpose(1, 2), draw(2, 40, 2, 12 + 16)
    query, key, value = draw(2, 4, 40, 16), draw(2, 2, 40, 16), draw(2, 2, 40, 16)
    return {
        "one projection": (fused[:, :4], fused[:, 4:6], fused[:, 6:]),
        "values behind an odd part": (query, key, latent[..., 12:].transpose(1, 2)),
        "one KV head, expanded": (query, key[:, :1].expand(-1, 2, -1, -1), value[:, :1].expand(-1, 2, -1, -1)),
        "one KV head, expanded to all": (query, key[:, :1].expand(-1, 4, -1, -1), value[:, :1].expand(-1, 4, -1, -1)),
        "one prefix, expanded": (query, key[:1].expand(2, -1, -1, -1), value[:1].expand(2, -1, -1, -1)),
        "keys as columns": (query, draw(2, 2, 16, 40).mT, value),
        "misaligned": (draw(2 * 4 * 40 * 16 + 1)[1:].view(2, 4, 40, 16), key, value),
    }


def _check_nan(choose: Choice, device: torch.device, dtype: torch.dtype, compare: Comparer) -> Iterator[Difference]:
    """Check that a NaN key affects exactly the queries that see it."""
    for tokens in (40, 300, 1500):
        query, key, value = square(4, 2, tokens, 64).tensors(device, dtype)
        key[1, 0, tokens // 2] = float("nan")
        kernels = _chosen(choose, query, 64, 2)
        q, k, v = (x.to(kernels.dtype or torch.float32) for x in (query, key, value))
        _, fused = identities.attend(kernels, q, k, v, 0.125, _WIDTHS)
        found = fused_numbers([QUERY_NUMBERS[name] for name in ("first_token_weight", "weight_sum")], fused)
        broken = torch.zeros(2, 4, tokens, dtype=torch.bool)
        broken[1, :2, tokens // 2 :] = True
        for name, values in found.items():
            yield compare.same(f"{name} of {tokens} tokens", values.isnan(), broken)


def _check_ragged(choose: Choice, device: torch.device, dtype: torch.dtype, compare: Comparer) -> Iterator[Difference]:
    """Compare statistics of a padded batch with single sequences in float64."""
    lengths = [150, 1, 37, 2, 90]
    query, key, value = Shape(5, 6, 2, 150, 150, 64, 64).tensors(device, dtype)
    wanted = frozenset(panel_names("fast")) - OUTPUT_STATISTICS.keys()
    at = torch.tensor(lengths, device=device)
    request = AttentionRequest(wanted, at, at, _WIDTHS)
    _, found = _ChosenCall(query, key, value, 0.125, causal=True, choose=choose).measure(request)
    for row, length in enumerate(lengths):
        q, k, v = (x[row : row + 1, :, :length].double() for x in (query, key, value))
        one = torch.tensor([length], device=device)
        blocks = AttentionRequest(wanted, one, one, _WIDTHS, path="blockwise")
        _, expected = ScoredCall(q, k, v, 0.125, causal=True).measure(blocks)
        for name, values in expected.items():
            bound = _rounded_bound(dtype, _ROUNDED) if "entropy" in name else _SHARE
            yield compare.close(f"{name}, {length} tokens", found[name][row], values[0], bound, smallest=1.0)
    past = torch.tensor([100], device=device)
    rest = _ChosenCall(query[:1, :, 50:], key[:1], value[:1], 0.125, causal=True, choose=choose)
    request = AttentionRequest(CONTINUABLE - VALUE_STATISTICS.keys(), past, past, _WIDTHS, past=50)
    blocks = replace(request, path="blockwise")
    late = ScoredCall(query[:1, :, 50:].double(), key[:1].double(), value[:1].double(), 0.125, causal=True)
    for name, values in late.measure(blocks)[1].items():
        bound = _rounded_bound(dtype, _ROUNDED) if "entropy" in name else _SHARE
        yield compare.close(f"{name} behind a past", rest.measure(request)[1][name], values, bound, smallest=1.0)


@dataclass(frozen=True)
class _ChosenCall(ScoredCall):
    """An attention call with chosen kernels."""

    choose: Choice = kernels_for

    def _kernels(self) -> FusedKernels | None:
        return self.choose(self.query_BHND, self.head_dim, self.num_attention_heads // self.num_key_value_heads)


def _compare(
    choose: Choice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compare: Comparer,
    what: str,
    *,
    window: int | None = None,
    sinks_BHN: Tensor | None = None,
) -> Iterator[Difference]:
    """Compare the kernels' output, log-sum-exp and numbers per query with explicit weights."""
    scale, dtype = query.shape[-1] ** -0.5, query.dtype
    kernels = _chosen(choose, query, max(query.shape[-1], value.shape[-1]), query.shape[1] // key.shape[1])
    whole = query.shape[2] == key.shape[2]
    needs = _WHOLE if whole else _AFTER_PAST
    q, k, v = (x.to(kernels.dtype or torch.float32) for x in (query, key, value))
    out, fused = identities.attend(kernels, q, k, v, scale, _WIDTHS, window=window, sinks_BHN=sinks_BHN)
    found = fused_numbers([QUERY_NUMBERS[name] for name in needs], fused)
    _, found["log-sum-exp"] = kernels.causal(q, k, k, scale) if window is None else kernels.band(q, k, k, scale, window)
    found["output"] = out
    rows = torch.arange(query.shape[2], device=query.device)
    if len(rows) > _MOST_ROWS:
        rows = torch.cat([rows[:8], rows[:: len(rows) // _SAMPLED], rows[-8:]])
    for name, expected in explicit_numbers(query, key, value, scale, rows, window, sinks_BHN).items():
        if name not in found:
            continue
        measured = found[name][:, :, rows]
        rounded = name in ("output", "entropy")
        bound = _rounded_bound(dtype, _ROUNDED) if rounded else _SHARE
        yield compare.close(f"{name}, {what}", measured, expected, bound, smallest=1.0)
        if rounded:
            bound = _rounded_bound(dtype, _ROUNDED_MEAN)
            yield compare.close(f"mean {name}, {what}", measured, expected, bound, mean=True, smallest=1.0)


def _chosen(choose: Choice, query: Tensor, width: int, groups: int) -> FusedKernels:
    kernels = choose(query, width, groups)
    if kernels is None:
        raise RuntimeError(f"no fused kernel serves width {width} with groups of {groups} in {query.dtype}")
    return kernels


def _rounded_bound(dtype: torch.dtype, epsilons: int) -> float:
    return epsilons * torch.finfo(dtype).eps if dtype in HALF else _SINGLE


def explicit_numbers(
    query_BHND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    scale: float,
    rows: Tensor,
    window: int | None,
    sinks_BHN: Tensor | None,
) -> dict[str, Tensor]:
    """Return output (B, H, R, Dv) and numbers (B, H, R) of the queries at ``rows`` (R,), in float64."""
    groups, past = query_BHND.shape[1] // key_BKSD.shape[1], key_BKSD.shape[2] - query_BHND.shape[2]
    query = query_BHND[:, :, rows].double()
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key_BKSD, value_BKSD))
    q, k = rows[:, None] + past, torch.arange(key.shape[2], device=rows.device)
    seen = (k <= q) & (k > q - (window or key.shape[2]))
    scores = (scale * query @ key.mT).masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    total = lse if sinks_BHN is None else torch.logaddexp(lse, sinks_BHN.double())
    weights = (scores - total[..., None]).exp()
    sink, recent = k < _WIDTHS.sink, (q - k < _WIDTHS.recent) & (k >= _WIDTHS.sink)

    def sum_where(chosen: Tensor) -> Tensor:
        return (weights * chosen).sum(-1)

    return {
        "output": weights @ value,
        "log-sum-exp": lse,
        "first_token_weight": weights[..., 0],
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "weight_sum": weights.sum(-1),
        "sink_mass": sum_where(sink),
        "recent_mass": sum_where(recent),
        "self_weight": sum_where(k == q),
        "previous_token_weight": sum_where(k == q - 1),
    }
