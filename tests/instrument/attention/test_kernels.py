"""How fused kernels are used, and blocks of explicit weights against their definition."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.attention import calls, fused
from headscan.attention.calls import ScoredCall, WeightsCall, WeightTally, attend_blockwise
from headscan.attention.fused import CpuKernels, CudaKernels, kernels_for
from headscan.catalog import MassWidths
from headscan.statistics.registry import fused_numbers, needed_numbers
from headscan.statistics.weight_statistics import AttentionRequest
from tests.instrument.attention.emulated_flash import SPLIT, flash_attention_forward
from tests.instrument.attention.test_device_kernels import CPU, EMULATED, layouts, square
from tests.small_models import make_loaded

NEEDS = frozenset(
    "first_token_weight entropy sink_mass recent_mass distant_mass self_weight previous_token_weight".split()
)


def emulated(dtype: torch.dtype) -> CudaKernels:
    """The half-precision kernels, with the GPU's operator emulated."""
    return CudaKernels(dtype, flash_attention_forward)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("size", [1.0, 300.0, 1e4])
def test_scores_of_any_size_have_exact_weights(size: float, window: int | None) -> None:
    """Scores of Pythia-70m reach 10,000. A kernel sums them in another order, and rounds otherwise, than identities."""
    query, key, value = square(4, 2, 160, 32, 16).tensors(CPU)
    query, key = query * size**0.5, key * size**0.5 + 3.0 * size**0.5
    lengths = torch.full((2,), 160)
    call = ScoredCall(query, key, value, 32**-0.5, True, window=window)
    exact = ScoredCall(query.double(), key.double(), value.double(), 32**-0.5, True, window=window)
    assert (exact.scale * query.double() @ key.double().repeat_interleave(2, 1).mT).abs().max() > 5.0 * size
    request = AttentionRequest(NEEDS, lengths, lengths, MassWidths(4, 16))
    out, found = call.measure(request)
    expected_out, expected = exact.measure(replace(request, path="blockwise"))
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-4, atol=2e-4)
    for name, values in expected.items():
        torch.testing.assert_close(found[name].double(), values.double(), rtol=2e-4, atol=5e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral-sliding", "gpt_oss", "deepseek_v3", None])
def test_ordinary_models_are_measured_in_fused_calls(family: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is the bundled model, which was trained."""
    lm = headscan.load("demo") if family is None else make_loaded(family)
    ids = torch.randint(5, 97, (2, 60))
    expected = headscan.collect(lm, ids, path="fused")
    monkeypatch.delattr(ScoredCall, "_measure_blockwise")
    for name, values in headscan.collect(lm, ids).items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
    [
        (1, 1, 1, 1, 1, 4, 4),
        (3, 4, 2, 64, 64, 8, 12),
        (2, 6, 1, 65, 65, 16, 8),
        (1, 3, 3, 200, 200, 8, 8),
        (2, 2, 2, 70, 90, 8, 8),
    ],
)
def test_blocks_on_a_cpu_give_output_and_entropy(
    sequences: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    size: float,
    in_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where scores lie hundreds apart, and where a block holds a part of the heads. Models show their queries
    with transposed strides.
    """
    if in_parts:
        monkeypatch.setattr(fused, "_BLOCK_SCORES", 1)
        monkeypatch.setattr(fused, "_BLOCK_QUERIES", 16)
        monkeypatch.setattr(fused, "_BLOCK_KEYS", 23)
    generator = torch.Generator().manual_seed(keys + width)
    query, key, value = (
        torch.randn(sequences, tokens, count, D, generator=generator).transpose(1, 2)
        for count, tokens, D in ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width))
    )
    query, value = query * size, value * size
    before = [x.clone() for x in (query, key, value)]
    out, lse, entropy = CpuKernels.causal_with_entropy(query, key, value, 0.5)
    assert all(torch.equal(x, y) for x, y in zip((query, key, value), before, strict=True))
    wide_key, wide_value = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    scores = (0.5 * query.double() @ wide_key.mT).masked_fill(later, float("-inf"))
    log_weights = scores.log_softmax(-1)
    weights = log_weights.exp()
    expected = torch.special.entr(weights).sum(-1)
    # A rounding of large scores changes the weights by as much.
    close = functools.partial(torch.testing.assert_close, rtol=1e-5 * size, atol=1e-5 * size, check_dtype=False)
    close(out.flatten(1, 2), weights @ wide_value)
    close(lse, scores.logsumexp(-1))
    close(entropy, expected)
    assert (entropy >= 0).all() and (entropy[:, :, 0] < 1e-30).all() == (keys == queries)


def test_a_device_without_a_fused_kernel_has_none() -> None:
    elsewhere = SimpleNamespace(device=torch.device("mps"), dtype=torch.bfloat16)
    assert kernels_for(elsewhere, 16, 2) is None
    assert isinstance(kernels_for(torch.empty(1, 4, 8, 16), 16, 2), CpuKernels)


@pytest.mark.parametrize("past", [1, 5, 150])
@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize("entropy", [False, True])
def test_queries_after_a_prefix_equal_those_of_whole_sequences(window: int | None, past: int, entropy: bool) -> None:
    tokens = past + 140  # more than one band of queries
    generator = torch.Generator().manual_seed(past)
    query, key, value = (torch.randn(2, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    needs = frozenset({"first_token_weight", "entropy"})
    (whole, whole_pass), (out, late_pass) = (
        fused.attend_fused(CpuKernels(), q, key, value, 0.35, MassWidths(), window=window, numbers_with_output=entropy)
        for q in (query, query[:, :, past:])
    )
    of_whole, found = (fused_numbers(needed_numbers(needs), fused) for fused in (whole_pass, late_pass))
    torch.testing.assert_close(out, whole[:, :, past:], rtol=1e-4, atol=1e-5)
    for name in needs:
        torch.testing.assert_close(found[name], of_whole[name][..., past:], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_cuda_kernels_serve(dtype: torch.dtype, width: int) -> None:
    query = torch.empty(1, 8, 16, width, device="cuda", dtype=dtype)
    assert isinstance(kernels_for(query, width, 4), CudaKernels)


@pytest.mark.parametrize("tokens", [5, 3 * SPLIT])
def test_a_row_that_is_not_finite_has_no_weights(tokens: int) -> None:
    """FlashAttention 2 returns +inf there or, where it splits the keys, the sum of the other blocks."""
    query, key, value = (torch.randn(2, heads, tokens, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    key[1, 0, 3] = float("nan")
    kernels = emulated(torch.bfloat16)
    for _, lse in (kernels.causal(query, key, value, 1.0), kernels.band(query, key, value, 1.0, tokens)):
        assert lse.shape == (2, 4, tokens)
        assert lse[1, :2, 3:].isnan().all()
        assert lse[1, :2, :3].isfinite().all() and lse[0].isfinite().all() and lse[1, 2:].isfinite().all()


def test_lengths_that_a_kernel_rounds_up_are_cut() -> None:
    def rounded(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        return query, torch.zeros(1, 4, 128), query

    query = torch.zeros(1, 4, 5, 8, dtype=torch.bfloat16)
    assert CudaKernels(torch.bfloat16, rounded).causal(query, query, query, 1.0)[1].shape == (1, 4, 5)


def test_layouts_that_the_kernel_can_load_are_not_copied() -> None:
    for name, tensors in layouts(EMULATED).items():
        if name in ("one projection", "one KV head, expanded", "one prefix, expanded"):
            for tensor in tensors:
                assert fused._loadable(tensor.transpose(1, 2)).data_ptr() == tensor.data_ptr(), name


def test_kernels_that_were_tried_without_memory_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(CudaKernels):
        def causal(self, *_: object) -> tuple[Tensor, Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    asked = (torch.device("cpu"), torch.bfloat16, 24, 3)
    monkeypatch.setattr(fused, "CudaKernels", Full)
    with pytest.raises(torch.OutOfMemoryError):
        fused._cuda_kernels(*asked)
    monkeypatch.setattr(fused, "CudaKernels", lambda dtype, **_: emulated(dtype))
    assert fused._cuda_kernels(*asked)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_weights_of_blocks_equal_their_definition(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, a past, masks of either kind, biases, soft caps, learned sinks, cross and bidirectional attention."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for name in ("BLOCK", "GPU_BLOCK"):
        monkeypatch.setattr(calls, name, draw(16, 23, 40))
    B, K, G, N, D = draw(1, 2), draw(1, 2), draw(1, 3), draw(1, 17, 50, 83), 8
    H, causal, past = K * G, draw(True, True, False), draw(0, 0, 1, 30)
    S = past + N if causal else draw(N, 37)
    past = past if causal else 0
    window = draw(None, 1, 5, 20, 60) if causal or S == N else None
    masked, biased, softcap = draw(None, None, "bool", "additive"), draw(False, False, True), draw(None, None, 2.0)
    sinks = draw(None, None, numbers(1, H, 1), numbers(B, H, N))
    query, key, value = numbers(B, H, N, D), numbers(B, K, S, D), numbers(B, K, S, 6)
    q, k = torch.arange(past, past + N)[:, None], torch.arange(S)
    seen = (k <= q) | (not causal)
    if window is not None:
        seen = seen & ((q - k).abs() < window)
    bias = numbers(1, H, draw(1, N), S) if biased else None
    mask = None
    if masked is not None:
        seen = seen & (torch.rand(B, 1, N, S, generator=generator) < 0.7)
        seen[:, :, N // 2] = False  # a padding query that sees no key
        mask = seen if masked == "bool" else torch.where(seen, 0.0, float("-inf")).double()

    scores = 0.5 * query @ key.repeat_interleave(G, 1).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores if bias is None else scores + bias).masked_fill(~seen, float("-inf"))
    parts = scores.exp()
    total = parts.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[..., None].exp())
    expected = torch.where(parts > 0, parts / total, 0.0)

    to = {"device": device}
    call = ScoredCall(
        query.to(**to),
        key.to(**to),
        value.to(**to),
        0.5,
        causal,
        cross=past + N != S,
        window=None if masked else window,
        mask=None if mask is None else mask.to(**to),
        bias=None if bias is None else bias.to(**to),
        softcap=softcap,
        sinks_BHN=None if sinks is None else sinks.to(**to),
    )
    found = torch.zeros(B, H, N, S, **to).double()

    class Blocks(WeightTally):
        taken = 0

        def add(self, weights: Tensor, first_query: int, first_key: int) -> None:
            taken = self.taken
            assert first_query == past + taken
            found[:, :, taken : taken + weights.shape[2], first_key : first_key + weights.shape[3]] = weights
            self.taken += weights.shape[2]

    ones = torch.ones(B, dtype=torch.long)
    nothing = AttentionRequest(frozenset(), ones, ones, MassWidths())
    blocks = Blocks(nothing, call.geometry)
    with torch.no_grad():
        out = attend_blockwise(call._wide(), blocks, past)
    assert blocks.taken == N
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(out.cpu(), expected @ value.repeat_interleave(G, 1))
    torch.testing.assert_close(attend_blockwise(call._wide(), WeightTally(nothing, call.geometry), past), out)
    if past == 0 and not call.cross:
        at = torch.randint(N, (B, 7), generator=generator)
        chosen = expected.gather(2, at[:, None, :, None].expand(-1, H, -1, S))
        torch.testing.assert_close(call.weights(at.to(**to)).cpu(), chosen)
        own = WeightsCall(expected.to(**to), value.to(**to), out, causal)
        torch.testing.assert_close(own.weights(at.to(**to)).cpu(), chosen, rtol=0, atol=0)
