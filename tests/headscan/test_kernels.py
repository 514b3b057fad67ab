"""Fused kernels against explicit scores: the CPU's own, and the way a half-precision device's are used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headscan import identities, kernels
from headscan.blockwise import Scores, attend
from headscan.explicit import WeightTally
from headscan.kernels import CpuKernels, CudaKernels, FusedKernels, kernels_for
from headscan.requests import AttentionRequest, MassWidths
from headscan.summaries import Geometry

NEEDS = frozenset(
    {
        "first_token_weight",
        "entropy",
        "sink_mass",
        "recent_mass",
        "distant_mass",
        "self_weight",
        "previous_token_weight",
        "learned_sink_mass",
    }
)


class EmulatedCuda(CudaKernels):
    """What the device's kernel computes, in plain arithmetic: half-precision inputs, float32 scores and sums."""

    @staticmethod
    def _call(query: Tensor, key: Tensor, value: Tensor, scale: float, width: int | None) -> tuple[Tensor, Tensor]:
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        groups = query.shape[1] // key.shape[1]
        scores = scale * query.float() @ key.float().repeat_interleave(groups, 1).mT
        at = torch.arange(key.shape[2])
        row = at[-query.shape[2] :, None]
        seen = at <= row
        if width is not None:
            seen &= at > row - width
        scores = scores.masked_fill(~seen, float("-inf"))
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ value.float().repeat_interleave(groups, 1)
        return out.to(value.dtype).unflatten(1, (-1, groups)), lse


def tensors(
    heads: int, kv_heads: int, tokens: int, width: int, value_width: int, *, peaked: float
) -> tuple[Tensor, ...]:
    """Queries, keys, values (2, heads, tokens, width); ``peaked`` draws all queries to the first key, like a sink."""
    generator = torch.Generator().manual_seed(tokens + width)
    query, key, value = (
        torch.randn(2, count, tokens, size, generator=generator)
        for count, size in ((heads, width), (kv_heads, width), (kv_heads, value_width))
    )
    direction = torch.randn(width, generator=generator)
    query = query + peaked * direction / direction.norm()
    key[:, :, 0] = peaked * direction / direction.norm()
    return query, key, value


def both_ways(
    kernels: FusedKernels,
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    sinks: Tensor | None,
    widths: MassWidths,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and numbers per query: by identities, and from explicit weights in float64 of the same inputs."""
    tokens, heads, scale = query.shape[2], query.shape[1], query.shape[-1] ** -0.5
    lengths = torch.full((2,), tokens)
    request = AttentionRequest(NEEDS, lengths, lengths, widths)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    out, found = identities.attend(
        kernels, query, key, value, scale, request.per_query, widths, window=window, sinks_BHN=sinks
    )
    tally = WeightTally(request, Geometry(tokens, tokens, True, False), 2, heads)
    scores = Scores(query.double(), key.double(), scale, True, window, sinks_BHN=sinks)
    expected_out = attend(scores, value.double(), tally.add)
    return {**found, "output": out}, {**tally.findings().per_query, "output": expected_out}


@pytest.mark.parametrize("window", [None, 7, 130, 500])
@pytest.mark.parametrize("learned_sink", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "width", "value_width"),
    [(4, 4, 300, 16, 16), (6, 2, 257, 24, 16), (3, 1, 129, 8, 20), (2, 2, 3, 8, 8), (4, 2, 128, 32, 32)],
)
def test_cpu_identities(
    heads: int, kv_heads: int, tokens: int, width: int, value_width: int, window: int | None, learned_sink: bool
) -> None:
    for peaked, widths in ((0.0, MassWidths(3, 20)), (6.0, MassWidths(5, 140)), (2.0, MassWidths(40, 1))):
        found, expected = both_ways(
            CpuKernels(),
            torch.float32,
            *tensors(heads, kv_heads, tokens, width, value_width, peaked=peaked),
            window=window,
            sinks=torch.linspace(-1, 4, heads)[None, :, None] if learned_sink else None,
            widths=widths,
        )
        for name, values in expected.items():
            torch.testing.assert_close(
                found[name].double(), values, rtol=2e-5, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("peaked", [0.0, 8.0])
def test_half_precision_identities(window: int | None, peaked: float) -> None:
    """Numbers stay within bfloat16's rounding of the one thing that is rounded: the outputs of the kernel."""
    found, expected = both_ways(
        EmulatedCuda(torch.bfloat16),
        torch.bfloat16,
        *tensors(6, 2, 300, 32, 32, peaked=peaked),
        window=window,
        sinks=torch.linspace(-1, 3, 6 * 300).view(1, 6, 300),
        widths=MassWidths(4, 50),
    )
    eps = torch.finfo(torch.bfloat16).eps
    for name, values in expected.items():
        error = (found[name].double() - values).abs()
        assert error.max() < 8 * eps, name
        if name not in ("output", "entropy"):
            assert error.max() < 1e-4, name  # float32 all the way


def test_a_device_without_a_fused_kernel_has_none() -> None:
    elsewhere = SimpleNamespace(device=torch.device("mps"), dtype=torch.bfloat16)
    assert kernels_for(elsewhere, 16, 2) is None
    assert isinstance(kernels_for(torch.empty(1, 4, 8, 16), 16, 2), CpuKernels)


@pytest.mark.parametrize("past", [1, 5, 150])
@pytest.mark.parametrize("window", [None, 7, 200])
def test_queries_behind_a_prefix_see_what_they_see_in_the_whole(window: int | None, past: int) -> None:
    tokens = past + 140  # more than one band of queries
    generator = torch.Generator().manual_seed(past)
    query, key, value = (torch.randn(2, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    needs = frozenset({"first_token_weight", "entropy"})
    whole, of_whole = identities.attend(CpuKernels(), query, key, value, 0.35, needs, MassWidths(), window=window)
    out, found = identities.attend(
        CpuKernels(), query[:, :, past:], key, value, 0.35, needs, MassWidths(), window=window
    )
    torch.testing.assert_close(out, whole[:, :, past:], rtol=1e-4, atol=1e-5)
    for name in needs:
        torch.testing.assert_close(found[name], of_whole[name][..., past:], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_cuda_kernels_serve(dtype: torch.dtype, width: int) -> None:
    query = torch.empty(1, 8, 16, width, device="cuda", dtype=dtype)
    assert isinstance(kernels_for(query, width, 4), CudaKernels)


def test_a_row_that_is_not_finite_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 gives +inf there, and lengths that are rounded up."""

    def forward(query: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        lse = torch.zeros(1, 4, 8)
        lse[..., 3] = float("inf")
        return query, lse, query, query, query

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    query, key = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    for _, lse in (
        CudaKernels(torch.bfloat16).causal(query, key, key, 1.0),
        CudaKernels(torch.bfloat16).band(query, key, key, 1.0, 2),
    ):
        assert lse.shape == (1, 4, 5)
        assert lse.isnan().any(1).tolist() == [[False, False, False, True, False]]
        assert not lse.isinf().any()


def test_kernels_that_were_tried_without_memory_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(EmulatedCuda):
        def causal(self, *_: object) -> tuple[Tensor, Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    asked = (torch.device("cpu"), torch.bfloat16, 24, 3)
    monkeypatch.setattr(kernels, "CudaKernels", Full)
    with pytest.raises(torch.OutOfMemoryError):
        kernels._trusted(*asked)
    monkeypatch.setattr(kernels, "CudaKernels", EmulatedCuda)
    assert kernels._trusted(*asked)
