"""Window attention and window masks equal an explicit softmax in float64."""

from __future__ import annotations

import pytest
import torch

from headscan.attention import cache_attention
from headscan.attention.cache_attention import ScoreTerms, scored_output
from headscan.attention.calls import ScoredCall
from headscan.kv import kv_windows, window_keys
from headscan.kv.kv_windows import windowed
from headscan.kv.padded_masks import MaskReader
from headscan.kv.window_keys import grouped_attention
from headscan.windows import DROPPED, Window


def explicit(call: ScoredCall, seen_BHNS: torch.Tensor) -> torch.Tensor:
    """Return attention by its definition in float64, over the keys that are seen."""
    group = call.num_attention_heads // call.num_key_value_heads
    query = call.query_BHND.double()
    key, value = (x.double().repeat_interleave(group, 1) for x in (call.key_BKSD, call.value_BKSD))
    scores = call.scale * query @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.double()
    scores = scores.masked_fill(~seen_BHNS, float("-inf"))
    if call.sinks_BHN is not None:
        sinks = call.sinks_BHN.double()[..., None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.nan_to_num() @ value


@pytest.mark.parametrize("seed", range(12))
def test_windows_equal_an_explicit_softmax(seed: int) -> None:
    torch.manual_seed(seed)
    B, K, G, D, Dv = (int(torch.randint(1, top, ())) for top in (3, 5, 4, 9, 9))
    S = int(torch.randint(1, 300, ()))
    N = S if seed % 3 else int(torch.randint(1, S + 1, ()))
    kinds = [None, DROPPED, Window(int(torch.randint(0, 9, ())), int(torch.randint(1, 60, ()))), Window(1, 1)]
    of_head = [kinds[int(torch.randint(0, 4, ()))] for _ in range(K)]
    groups = tuple((tuple(k for k in range(K) if of_head[k] == kind), kind) for kind in kinds if kind in of_head)
    call = ScoredCall(
        torch.randn(B, K * G, N, D),
        torch.randn(B, K, S, D),
        torch.randn(B, K, S, Dv),
        scale=0.3,
        causal=True,
        bias=torch.randn(1, K * G, N, S) if seed % 4 == 1 else None,
        softcap=2.0 if seed % 4 == 2 else None,
        sinks_BHN=torch.randn(1, K * G, 1) if seed % 4 == 3 else None,
    )
    at = torch.arange(S)
    causal = (at <= at[:, None])[S - N :]

    def seen(window: Window | None) -> torch.Tensor:
        if window is None:
            return causal
        near = at > at[:, None] - window.recent
        return causal & (near | (at < window.sink))[S - N :] if window != DROPPED else torch.zeros_like(causal)

    expected = explicit(call, torch.stack([seen(of_head[h // G]) for h in range(K * G)])[None])
    assert (windowed(call, groups, MaskReader()) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_the_heads_of_a_group_are_selected_without_copying_lists(order: tuple[int, ...], monkeypatch) -> None:
    kv_windows._selection.cache_clear()
    made = []
    tensor = torch.tensor
    call = ScoredCall(torch.randn(1, 6, 9, 4), torch.randn(1, 3, 9, 4), torch.randn(1, 3, 9, 4), 0.5, causal=True)
    groups = ((order[:2], None), (order[2:], Window(1, 3)))
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: made.append(a) or tensor(*a, **k))
    first = windowed(call, groups, MaskReader())
    assert len(made) == (0 if order == (0, 1, 2) else 2)  # the indices of KV heads and of query heads
    assert torch.equal(windowed(call, groups, MaskReader()), first) and len(made) <= 2


@torch.enable_grad()
def test_derivatives_may_follow_inference_mode() -> None:
    kv_windows._selection.cache_clear()
    query, key = torch.randn(1, 6, 9, 4, requires_grad=True), torch.randn(1, 3, 9, 4)
    groups = (((0, 2), None), ((1,), Window(1, 3)))
    with torch.inference_mode():
        windowed(ScoredCall(query, key, key, 0.5, causal=True), groups, MaskReader())
    out = windowed(ScoredCall(query, key, key, 0.5, causal=True, softcap=3.0), groups, MaskReader())
    (gradient,) = torch.autograd.grad(out.sum(), [query])
    assert gradient.isfinite().all()


@pytest.mark.parametrize("terms", [ScoreTerms(), ScoreTerms(softcap=1.5), ScoreTerms(sinks_BHN=torch.ones(1, 6, 1))])
@pytest.mark.parametrize("most", [1, 1 << 26])
def test_a_group_of_query_heads_reads_one_kv_head(
    terms: ScoreTerms, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_keys, "_MOST_MASK", most)  # large masks are read row by row
    torch.manual_seed(0)
    for N in (1, 5):
        query, key, value = torch.randn(2, 2, 3, N, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 6)
        seen = torch.rand(2, N, 9) > 0.4
        seen[..., 0] = True
        call = ScoredCall(query.flatten(1, 2), key, value, 0.5, True, softcap=terms.softcap, sinks_BHN=terms.sinks_BHN)
        expected = explicit(call, seen[:, None])
        found = grouped_attention(query, key, value, 0.5, seen, terms=terms).flatten(1, 2)
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks_only", [False, True])
def test_one_query_in_half_precision(masked: bool, sinks_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_attention, "output_after", None)  # it copies the cache to float32
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 4)
    seen = torch.rand(2, 1, 1, 30) > 0.3 if masked else torch.ones(2, 1, 1, 30, dtype=torch.bool)
    terms = ScoreTerms(bias=torch.randn(1, 6, 1, 30), softcap=3.0, sinks_BHN=torch.randn(1, 6, 1))
    terms = ScoreTerms(sinks_BHN=terms.sinks_BHN) if sinks_only else terms
    tensors = [x.bfloat16() for x in (query, key, value)]
    found = scored_output(*tensors, 0.4, seen if masked else None, terms)
    call = ScoredCall(*tensors, 0.4, True, bias=terms.bias, softcap=terms.softcap, sinks_BHN=terms.sinks_BHN)
    assert found.dtype == torch.bfloat16
    assert (found - explicit(call, seen)).abs().max() <= 0.02
