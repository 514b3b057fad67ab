"""Damage of windows equals an oracle's derivative, a finite difference, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headscan
from headscan.architectures import VOCABULARY
from headscan.attention.calls import ScoredCall
from headscan.errors import NotFiniteError, PlanMismatchError, SequenceError, UnsupportedModelError
from headscan.gradients.backward import same_output
from headscan.gradients.losses import NextTokenLoss
from headscan.kv import kv_damage as gate_gradients
from headscan.kv.kv_damage import kv_damages_by_sequence, window_candidates
from headscan.kv.kv_windows import KvWindows
from headscan.kv.padded_masks import MaskReader
from headscan.layers.blocks import find_blocks
from headscan.windows import KeptKeys, Window
from tests.instrument.kv.gate_oracle import oracle_damages, sequence_losses
from tests.small_models import distinct_first, make_loaded

SINK, RECENT, LENGTHS = 2, 9, [50, 41, 33]
#: GQA, MHA, MQA, biases, partial rotary, parallel blocks, hybrid sliding layers, soft caps, learned sinks, values
#: narrower than keys, a hybrid with linear attention, shared keys, chunked attention, SDPA inside the model.
FAMILIES = (
    "llama llama-mha llama-mqa-wide qwen2 qwen3 gpt_neox phi stablelm cohere gpt2 opt granite gemma2-softcap gemma3 "
    "gemma3n gpt_oss mimo_v2_flash qwen3_next jamba llama4 falcon-gqa falcon-alibi mixtral"
).split()


#: Their experts have no kernel in float64.
SINGLE_ONLY = {"gpt_oss", "mimo_v2_flash", "qwen3_next", "jamba", "mixtral"}


def some_ids(seed: int = 0, tokens: int = 50) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (3, tokens), generator=generator)


@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_damage_is_the_derivative_of_an_explicit_mixture(family: str) -> None:
    ids = some_ids()
    dtypes = (torch.float32,) if family in SINGLE_ONLY else (torch.float64, torch.float32)
    exact = make_loaded(family, dtype=dtypes[0])
    heads = list(window_candidates(exact))
    expected = oracle_damages(exact, ids, LENGTHS, heads, SINK, RECENT, 0.5)
    at = tuple(zip(*heads, strict=True))
    for dtype, bound in zip(dtypes, (1e-6, 1e-4)[-len(dtypes) :], strict=True):
        found = kv_damages_by_sequence(make_loaded(family, dtype=dtype), ids, LENGTHS, SINK, RECENT)
        ours = found[:, *at]
        assert (ours.double() - expected).norm() <= bound * expected.norm()
        absent = torch.ones(found.nanmean(0).shape, dtype=torch.bool)
        absent[at] = False
        assert found.nanmean(0)[absent].isnan().all()


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_damage_is_a_finite_difference(family: str) -> None:
    lm, ids, step = make_loaded(family, dtype=torch.float64), some_ids(1), 2e-3  # norms round to float32
    heads = list(window_candidates(lm))
    widths = {site.layer: site.num_key_value_heads for site in lm.grid.sites}
    found = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT, gates=(0.3,))
    for layer, kv_head in heads[:3]:
        losses = []
        for shift in (step, -step):
            gates = {at: torch.full((3, widths[at]), 0.3, dtype=torch.float64) for at, _ in heads}
            gates[layer][:, kv_head] += shift
            losses.append(sequence_losses(lm, ids, LENGTHS, gates, SINK, RECENT))
        difference = -(losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(found[:, layer, kv_head].double(), difference, rtol=1e-2, atol=1e-5)


def test_a_sequence_has_the_same_damage_alone_in_any_batch_and_in_parts_of_the_head(monkeypatch) -> None:
    lm, ids = make_loaded("llama"), some_ids()
    whole = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT)
    lists = [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]
    torch.testing.assert_close(headscan.kv_damage(lm, lists, None, SINK, RECENT), whole.nanmean(0), equal_nan=True)
    split = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT, batch_tokens=1)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-7)
    monkeypatch.setattr("headscan.gradients.losses.LOGITS", 1)
    torch.testing.assert_close(kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT), whole, rtol=1e-4, atol=1e-7)


def test_only_the_last_tokens_can_be_scored() -> None:
    lm, ids = make_loaded("llama", dtype=torch.float64), some_ids()
    whole, last, first = (
        kv_damages_by_sequence(lm, ids, lengths, SINK, RECENT, scored=scored)[0]
        for lengths, scored in ((LENGTHS, None), (LENGTHS, [20, 5, 5]), ([30, 41, 33], None))
    )
    torch.testing.assert_close((last * 20 + first * 29) / 49, whole, rtol=1e-5, atol=1e-8)
    with pytest.raises(SequenceError, match="scored tokens of sequence 2: 33"):
        kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT, scored=[1, 1, 33])


def test_half_precision_keeps_the_ranking_and_float32_gradients() -> None:
    ids = some_ids()
    exact = headscan.kv_damage(make_loaded("llama"), ids, LENGTHS, SINK, RECENT)
    half = headscan.kv_damage(make_loaded("llama", dtype=torch.bfloat16), ids, LENGTHS, SINK, RECENT)
    assert half.dtype == torch.float32
    assert (half - exact).norm() < 0.1 * exact.norm()


def test_derivatives_of_long_texts_survive_float16() -> None:
    """Large hidden states have small derivatives; without a scale the error is 0.03."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (1, 1000), generator=generator)
    exact, half = (find_blocks(make_loaded("llama", dtype=dtype)) for dtype in (torch.float64, torch.float16))
    loss = NextTokenLoss.of(ids, [1000])
    hidden = 300 * torch.randn(1, 1000, exact.lm.model.config.hidden_size, generator=generator)
    expected = loss.gradient(exact, hidden.double())
    found = loss.gradient(half, hidden.half())
    assert (found - expected).norm() < 0.002 * expected.norm()


def test_a_subset_of_the_heads_has_the_damage_of_all() -> None:
    lm, ids = make_loaded("llama"), some_ids()
    whole = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT)
    part = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT, heads=[(2, 1), (1, 0)])
    assert torch.equal(part[:, [2, 1], [1, 0]], whole[:, [2, 1], [1, 0]])
    assert int((~part.isnan()).sum()) == 2 * len(LENGTHS)
    with pytest.raises(PlanMismatchError, match=r"damage of \(layer, KV head\) \(2, 9\)"):
        kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT, heads=[(2, 1), (2, 9)])


def test_padding_has_any_id() -> None:
    lm, ids = make_loaded("llama"), some_ids()
    expected = kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT)
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = -100
    assert torch.equal(kv_damages_by_sequence(lm, ids, LENGTHS, SINK, RECENT), expected)


def test_damages_that_are_not_finite_are_refused() -> None:
    lm, ids = make_loaded("llama"), some_ids()
    torch.nn.init.constant_(lm.model.model.norm.weight, float("nan"))
    with pytest.raises(NotFiniteError, match=r"NaN or infinite damages: 12 of 12 \(limit 0\)"):
        kv_damages_by_sequence(lm, ids, [50, 11, 33], SINK, RECENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_repeated_block_may_differ_by_rounding_only(dtype: torch.dtype) -> None:
    out = torch.ones(1, 4, 8, dtype=dtype)
    assert same_output(out, out * (1 + torch.finfo(dtype).eps))
    assert not same_output(out, out * 1.05)


@torch.enable_grad()
def test_values_wider_than_keys_have_windows() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 30, width) for heads, width in ((4, 4), (2, 4), (2, 6)))
    call = ScoredCall(query.requires_grad_(), key, value, 0.5, causal=True)
    near = gate_gradients._near(call, Window(SINK, RECENT), MaskReader())
    narrow_call = ScoredCall(query, key, value[..., :4], 0.5, causal=True)
    narrow = gate_gradients._near(narrow_call, Window(SINK, RECENT), MaskReader())
    torch.testing.assert_close(near[..., :4], narrow)
    assert near.requires_grad and gate_gradients._output(call).shape == near.shape


def test_short_sequences_are_left_out_and_reported(caplog) -> None:
    lm, ids = make_loaded("llama"), some_ids()
    found = kv_damages_by_sequence(lm, ids, [50, 11, 33], SINK, RECENT)
    assert found[[0, 2]].isfinite().flatten(1).any(1).all()
    assert found[1].isnan().all()
    assert "1 of 3 sequences are not longer than the window of 11 tokens" in caplog.text
    assert torch.equal(found.nanmean(0), found[[0, 2]].mean(0))
    with pytest.raises(SequenceError, match="longest sequence has 11 tokens"):
        kv_damages_by_sequence(lm, ids, [11, 9, 10], SINK, RECENT)


@pytest.mark.parametrize(("sink", "recent"), [(4.5, 1), (1, "4")])
def test_a_window_has_whole_numbers_of_keys(sink: Any, recent: Any) -> None:
    with pytest.raises(PlanMismatchError, match=r"^window of a KV head: sink .* Pass whole numbers of keys$"):
        Window(sink, recent)


@pytest.mark.parametrize(("sink", "recent"), [(-1, 4), (4, 0), (0, 0)])
def test_a_window_of_no_tokens_is_refused(sink: int, recent: int) -> None:
    with pytest.raises(PlanMismatchError, match="limit sink 0, recent 1"):
        headscan.kv_damage(make_loaded("llama"), some_ids(), LENGTHS, sink, recent)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek_v3", "latent"),
        ("mistral-sliding", "keep a window already"),
        ("bert", "not a decoder"),
        ("bloom", "own attention weights"),
    ],
)
def test_models_without_candidates_are_refused_on_one_line(family: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as problem:
        headscan.kv_damage(make_loaded(family), some_ids(), LENGTHS, SINK, RECENT)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("gates", [(), (1.5,), (-0.1, 0.5)])
def test_gates_out_of_range_are_refused(gates: tuple[float, ...]) -> None:
    with pytest.raises(PlanMismatchError, match="gates="):
        headscan.kv_damage(make_loaded("llama"), some_ids(), LENGTHS, SINK, RECENT, gates=gates)


@pytest.mark.parametrize("family", ["llama", "falcon-gqa", "gemma2-softcap"])
def test_a_real_window_equals_the_closed_gate(family: str) -> None:
    """Falcon shows its keys once for every query head."""
    lm, ids = make_loaded(family), some_ids()
    layer, kv_head = window_candidates(lm)[-1]
    widths = {site.layer: site.num_key_value_heads for site in lm.grid.sites}
    gates = {layer: torch.ones(3, widths[layer])}
    gates[layer][:, kv_head] = 0
    expected = sequence_losses(lm, ids, LENGTHS, gates, SINK, RECENT)
    with headscan.intervene(lm, KvWindows(KeptKeys.of([(layer, kv_head, Window(SINK, RECENT))]))):
        logits = lm.model(input_ids=ids, use_cache=False).logits
    for row, length in enumerate(LENGTHS):
        loss = torch.nn.functional.cross_entropy(logits[row, : length - 1], ids[row, 1:length])
        torch.testing.assert_close(loss, expected[row], rtol=1e-4, atol=1e-5)
