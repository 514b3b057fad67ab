"""The fused kernels of ``--device`` and the identities on them, against explicit float64 weights.

On a CPU the kernels of CUDA are emulated in bfloat16. Kernels with a fault are found.

Shapes: B sequences, N queries, S keys, R compared rows, H query heads, K KV heads, D and Dv widths of a key and of a
value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from headscan.attention import fused as identities
from headscan.attention.calls import ScoredCall
from headscan.attention.fused import CpuKernels, CudaKernels, FusedKernels, kernels_for
from headscan.catalog import MassWidths, panel_names
from headscan.statistics.registry import CONTINUABLE, OUTPUT_STATISTICS, QUERY_NUMBERS, VALUE_STATISTICS, fused_numbers
from headscan.statistics.weight_statistics import AttentionRequest
from tests.devices import assert_near
from tests.instrument.attention.emulated_flash import cudnn_attention, flash_attention_forward

HALF = (torch.bfloat16, torch.float16)
#: Largest error of a share (a weight, a mass), of a log-sum-exp, and of a norm: float32 sums in any order.
SHARE = 1e-4
#: Largest error of numbers that the kernel rounds, in units of the dtype's epsilon: of one query, and of the mean.
ROUNDED, ROUNDED_MEAN = 6, 1
#: The same bound in float32, in which rounding errors of many numbers add up.
SINGLE = 1e-5
WIDTHS = MassWidths(sink=4, recent=48)
WHOLE = frozenset(
    {"first_token_weight", "entropy", "weight_sum", "sink_mass", "recent_mass", "self_weight", "previous_token_weight"}
)
AFTER_PAST = frozenset({"first_token_weight", "entropy"})
#: Largest number of rows with explicit weights; a longer sequence is sampled to about this number.
MOST_ROWS, SAMPLED = 1000, 64


class Kernels(NamedTuple):
    """The kernels under test: ``choose`` returns them as `kernels_for` does."""

    device: torch.device
    dtype: torch.dtype
    choose: Callable[[Tensor, int, int], FusedKernels | None] = kernels_for

    def of(self, query: Tensor, width: int, groups: int) -> FusedKernels:
        kernels = self.choose(query, width, groups)
        assert kernels is not None, f"no fused kernel serves width {width} with groups of {groups} in {query.dtype}"
        return kernels

    def rounded(self, epsilons: int) -> float:
        return epsilons * torch.finfo(self.dtype).eps if self.dtype in HALF else SINGLE


CPU = Kernels(torch.device("cpu"), torch.float32)


EMULATED = Kernels(CPU.device, torch.bfloat16, lambda query, *_: CudaKernels(query.dtype, flash_attention_forward))
WITH_CUDNN = EMULATED._replace(
    choose=lambda query, *_: CudaKernels(query.dtype, flash_attention_forward, cudnn_attention, lambda *_: True)
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on a CPU's own kernels and on emulated ones, or on a GPU's own in both half precisions."""
    if "kernels" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        tried = {"own": CPU, "emulated": EMULATED, "emulated cuDNN": WITH_CUDNN}
        if device.type != "cpu":
            tried = {str(dtype): Kernels(device, dtype) for dtype in HALF}
        metafunc.parametrize("kernels", list(tried.values()), ids=list(tried))


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

    def tensors(self, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """Return random queries, keys and values (B, heads, tokens, width)."""
        generator = torch.Generator().manual_seed(self.keys + self.width)

        def draw(heads: int, tokens: int, width: int) -> Tensor:
            return torch.randn(self.sequences, heads, tokens, width, generator=generator)

        query, key = draw(self.heads, self.queries, self.width), draw(self.kv_heads, self.keys, self.width)
        if self.peaked:
            direction = self.peaked * torch.nn.functional.normalize(torch.randn(self.width, generator=generator), dim=0)
            query, key[:, :, 0] = query + direction, direction
        value = draw(self.kv_heads, self.keys, self.value_width)
        query, key, value = (x.to(kernels.device, kernels.dtype) for x in (query, key, value))
        return query, key, value


def square(heads: int, kv_heads: int, tokens: int, width: int, value_width: int | None = None) -> Shape:
    """Return the inputs of two whole sequences."""
    return Shape(2, heads, kv_heads, tokens, tokens, width, value_width or width)


def behind(queries: int, keys: int, heads: int, kv_heads: int, width: int, sequences: int = 3) -> Shape:
    """Return the inputs of continuations: queries of the last tokens only."""
    return Shape(sequences, heads, kv_heads, queries, keys, width, width)


def shapes(title: str, device: torch.device) -> list[Shape]:
    """Return the inputs of a case; on a CPU fewer tokens."""
    small = device.type == "cpu"
    tokens, longer, many = (96, 150, 512) if small else (384, 1000, 4096)
    gqa, mha, mqa = square(8, 2, tokens, 64), square(4, 4, longer, 128), square(6, 1, tokens, 32)
    heads = ((8, 8, 64), (32, 8, 128), (6, 1, 64))
    decode = [behind(1, keys, *each) for keys in (1, 2, 129, many) for each in heads]
    decode += [replace(shape, sequences=1) for shape in decode[-3:]]
    past = [behind(5, 300, 8, 2, 64), behind(140, 200 if small else 840, 8, 2, 128), behind(17, many, 6, 1, 64, 1)]
    long = replace(square(4, 2, 512 if small else 32768, 128), sequences=1)
    return {
        "whole sequences": [gqa, mha, mqa, square(6, 2, tokens, 80), square(4, 2, longer, 16), square(2, 2, 3, 64)],
        "widths that are no multiple of 8": [
            square(4, 2, tokens, 12),
            square(4, 1, 50, 20),
            square(6, 6, tokens, 12, 10),
            square(2, 2, 40, 4),
        ],
        "wide heads": [square(4, 4, tokens, 192, 128), square(4, 2, 70, 256), square(4, 2, 70, 64, 96)],
        "windows": [replace(shape, window=window) for shape in (gqa, mqa) for window in (1, 7, 128, tokens - 1)],
        "learned sinks": [replace(each, sinks=True, window=window) for each in (gqa, mha) for window in (None, 40)],
        "a sink-like first key": [replace(x, peaked=8.0, window=window) for x in (gqa, mqa) for window in (None, 64)],
        "one query on many keys": decode,
        "some queries behind a past": past,
        "windows behind a past": [replace(x, window=w) for x in [*past, decode[-1]] for w in (1, 7, 130)],
        "long sequences": [long, replace(long, window=500)],
    }[title]


TITLES = (
    "whole sequences",
    "widths that are no multiple of 8",
    "wide heads",
    "windows",
    "learned sinks",
    "a sink-like first key",
    "one query on many keys",
    "some queries behind a past",
    "windows behind a past",
    "long sequences",
)


@pytest.mark.gpu
@pytest.mark.parametrize("title", TITLES)
def test_numbers_of_fused_kernels(title: str, kernels: Kernels) -> None:
    for shape in shapes(title, kernels.device):
        sinks = None
        if shape.sinks:  # one for each query, or one for all
            queries = shape.queries if shape.window else 1
            sinks = torch.linspace(-1, 3, shape.heads * queries, device=kernels.device).view(1, shape.heads, queries)
        check(kernels, *shape.tensors(kernels), f"{shape}", window=shape.window, sinks_BHN=sinks)


@pytest.mark.gpu
def test_fused_kernels_serve_every_width(kernels: Kernels) -> None:
    """On a GPU the blockwise path silently replaces a failed kernel."""
    for width in (8, 12, 16, 64, 80, 96, 128, 192, 256):
        for groups in (1, 4):
            query = torch.zeros(1, 2 * groups, 4, width, device=kernels.device, dtype=kernels.dtype)
            assert isinstance(kernels.of(query, width, groups), CpuKernels if kernels == CPU else CudaKernels)


def layouts(kernels: Kernels) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return queries (2, 4, 40, 16), keys and values (2, 2, 40, 16) in the memory layouts of models."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kernels.device, kernels.dtype)

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


@pytest.mark.gpu
def test_views_expanded_and_misaligned_tensors(kernels: Kernels) -> None:
    for name, (query, key, value) in layouts(kernels).items():
        for queries in (1, 9, query.shape[2]):
            check(kernels, query[:, :, -queries:], key, value, f"{name}, {queries} queries")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 300, 1500])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_key_that_is_not_a_number_shows_in_the_queries_that_see_it(
    tokens: int, entropy: bool, kernels: Kernels
) -> None:
    query, key, value = square(4, 2, tokens, 64).tensors(kernels)
    key[1, 0, tokens // 2] = float("nan")
    chosen = kernels.of(query, 64, 2)
    q, k, v = (x.to(chosen.dtype or torch.float32) for x in (query, key, value))
    _, fused = identities.attend_fused(chosen, q, k, v, 0.125, WIDTHS, numbers_with_output=entropy)
    broken = torch.zeros(2, 4, tokens, dtype=torch.bool)
    broken[1, :2, tokens // 2 :] = True
    for name in ("first_token_weight", "weight_sum"):
        (values,) = fused_numbers([QUERY_NUMBERS[name]], fused).values()
        assert torch.equal(values.isnan().cpu(), broken), name


@dataclass(frozen=True)
class ChosenCall(ScoredCall):
    """An attention call with the kernels under test."""

    kernels: Kernels = CPU

    def _kernels(self) -> FusedKernels | None:
        return self.kernels.of(self.query_BHND, self.head_dim, self.num_attention_heads // self.num_key_value_heads)


@pytest.mark.gpu
def test_statistics_of_a_padded_batch(kernels: Kernels) -> None:
    """The reference is single sequences in float64, in blocks of queries."""
    lengths = [150, 1, 37, 2, 90]
    query, key, value = Shape(5, 6, 2, 150, 150, 64, 64).tensors(kernels)
    wanted = frozenset(panel_names("fast")) - OUTPUT_STATISTICS.keys()
    at = torch.tensor(lengths, device=kernels.device)

    def near(name: str, found: Tensor, expected: Tensor, what: str) -> None:
        bound = kernels.rounded(ROUNDED) if "entropy" in name else SHARE
        assert_near(found, expected, bound, f"{name}, {what}", smallest=1.0)

    _, found = ChosenCall(query, key, value, 0.125, causal=True, kernels=kernels).measure(
        AttentionRequest(wanted, at, at, WIDTHS)
    )
    for row, length in enumerate(lengths):
        q, k, v = (x[row : row + 1, :, :length].double() for x in (query, key, value))
        one = torch.tensor([length], device=kernels.device)
        blocks = AttentionRequest(wanted, one, one, WIDTHS, path="blockwise")
        for name, values in ScoredCall(q, k, v, 0.125, causal=True).measure(blocks)[1].items():
            near(name, found[name][row], values[0], f"{length} tokens")
    past = torch.tensor([100], device=kernels.device)
    rest = ChosenCall(query[:1, :, 50:], key[:1], value[:1], 0.125, causal=True, kernels=kernels)
    request = AttentionRequest(CONTINUABLE - VALUE_STATISTICS.keys(), past, past, WIDTHS, past=50)
    late = ScoredCall(query[:1, :, 50:].double(), key[:1].double(), value[:1].double(), 0.125, causal=True)
    for name, values in late.measure(replace(request, path="blockwise"))[1].items():
        near(name, rest.measure(request)[1][name], values, "behind a past")


class NoWindow(CpuKernels):
    """Sees all keys."""

    def band(self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
        return self.causal(query, key, value, scale)


class FromTheStart(CpuKernels):
    """A wrong kernel that places the first query at the first key."""

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return super().causal(query, key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], scale)


class Finite(CpuKernels):
    """Lets no NaN show in the log-sum-exp."""

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = super().causal(query, key, value, scale)
        return out, lse.nan_to_num()


def test_kernels_with_a_fault_are_found() -> None:
    def faulty(kernels: FusedKernels) -> Kernels:
        return CPU._replace(choose=lambda *_: kernels)

    with pytest.raises(AssertionError, match="output"):
        test_numbers_of_fused_kernels("windows", faulty(NoWindow()))
    with pytest.raises(AssertionError, match="error"):
        test_numbers_of_fused_kernels("one query on many keys", faulty(FromTheStart()))
    with pytest.raises(AssertionError, match="first_token_weight"):
        test_a_key_that_is_not_a_number_shows_in_the_queries_that_see_it(40, False, faulty(Finite()))
    with pytest.raises(AssertionError, match="no fused kernel serves width 8"):
        test_fused_kernels_serve_every_width(CPU._replace(choose=lambda *_: None))
    one = torch.tensor([1.0, 2.0])
    for found, bound in ((one * 1.1, 0.09), (torch.tensor([1.0, float("nan")]), 1.0), (one[:1], 1.0)):
        with pytest.raises(AssertionError, match="two numbers"):
            assert_near(found, one, bound, "two numbers")


def check(
    kernels: Kernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    what: str,
    *,
    window: int | None = None,
    sinks_BHN: Tensor | None = None,
) -> None:
    """Compare output, log-sum-exp and numbers per query with explicit weights."""
    scale = query.shape[-1] ** -0.5
    chosen = kernels.of(query, max(query.shape[-1], value.shape[-1]), query.shape[1] // key.shape[1])
    needs = WHOLE if query.shape[2] == key.shape[2] else AFTER_PAST
    q, k, v = (x.to(chosen.dtype or torch.float32) for x in (query, key, value))
    out, fused = identities.attend_fused(
        chosen, q, k, v, scale, WIDTHS, window=window, sinks_BHN=sinks_BHN, numbers_with_output=True
    )
    found = fused_numbers([QUERY_NUMBERS[name] for name in needs], fused)
    _, found["log-sum-exp"] = chosen.causal(q, k, k, scale) if window is None else chosen.band(q, k, k, scale, window)
    found["output"] = out
    rows = torch.arange(query.shape[2], device=query.device)
    if len(rows) > MOST_ROWS:
        rows = torch.cat([rows[:8], rows[:: len(rows) // SAMPLED], rows[-8:]])
    for name, expected in explicit_numbers(query, key, value, scale, rows, window, sinks_BHN).items():
        if name not in found:
            continue
        measured = found[name][:, :, rows]
        rounded = name in ("output", "entropy")
        bound = kernels.rounded(ROUNDED) if rounded else SHARE
        assert_near(measured, expected, bound, f"{name}, {what}", smallest=1.0)
        if rounded:
            bound = kernels.rounded(ROUNDED_MEAN)
            assert_near(measured, expected, bound, f"mean {name}, {what}", mean=True, smallest=1.0)


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
    sink, recent = k < WIDTHS.sink, (q - k < WIDTHS.recent) & (k >= WIDTHS.sink)

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
