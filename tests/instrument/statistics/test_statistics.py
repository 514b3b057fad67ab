"""Every statistic on every family against the float64 reference; both paths; independence of the batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headscan
from headscan.architectures import ENCODER_DECODERS, FAMILIES, SITES, VOCABULARY
from headscan.attention.calls import WeightTally
from headscan.attention.hooks import SESSIONS
from headscan.catalog import DISTANCE_BINS, PROFILES, SCORES, STATISTICS, panel_names
from headscan.errors import NotFiniteError, UnsupportedModelError
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.registry import EXPLICIT, QUERY_NUMBERS, weight_statistics
from headscan.statistics.weight_statistics import (
    AttentionRequest,
    CallNumbers,
    Geometry,
    Received,
    WeightBlock,
    WeightByOffset,
    doubling_sums,
)
from tests.devices import assert_near, on
from tests.instrument.reference import reference
from tests.small_models import distinct_first, make_loaded

#: Relative 1e-5. The floor is for numbers that are zero by construction or nearly: a distant mass in a short sequence,
#: or the entropy of a sequence of two tokens, where float32 scores leave an absolute error and nothing averages it out.
RTOL, ATOL, ATOL_TINY = 1e-5, 2e-7, 5e-6
#: In half precision the model's own activations are rounded: mean error over all heads and sequences, in units of the
#: dtype's epsilon; relative for norms and entropies, absolute for shares, which may be zero. Most families stay below
#: one; those that send tokens to the best experts now and then send one elsewhere.
HALF_BOUND = 8
#: Largest error on a GPU in float32, relative to the statistic's largest number.
GPU_BOUND = 3e-5

LENGTHS = [150, 1, 37, 2, 90]
WIDTHS = headscan.MassWidths(sink=3, recent=16)
FAST, FULL = panel_names("fast"), panel_names("full")


def ragged(lengths: list[int], seed: int = 1) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    return ids, [row[:length] for row, length in zip(ids, lengths, strict=True)]


def assert_close(found: Tensor, expected: Tensor, name: str, tokens: int, device: torch.device) -> None:
    """One sequence's numbers; an arg-max may fall on the other side of a near tie."""
    if name == "argmax_offsets":
        assert torch.equal(found.isnan(), expected.isnan())
        assert (found.double() - expected).nan_to_num().abs().sum() < 0.01 * expected[..., 0].numel(), name
        return
    if device.type != "cpu":
        assert_near(found, expected, GPU_BOUND, f"{name} at {tokens} tokens")
        return
    atol = ATOL if tokens > 2 else ATOL_TINY
    torch.testing.assert_close(
        found.double(), expected, rtol=RTOL, atol=atol, equal_nan=True, msg=lambda m: f"{name} at {tokens} tokens: {m}"
    )


@lru_cache(maxsize=4)
def measured_slowly(family: str, site: str, device: torch.device) -> tuple[LoadedModel, dict[str, Tensor]]:
    """Return a model at a kind of site on the device, and its reference statistics."""
    lm = make_loaded(family)
    sequences = ragged(LENGTHS)[1]
    decoder = ragged(LENGTHS[::-1], seed=2)[1] if family in ENCODER_DECODERS else None
    expected = reference(lm.model, family, sequences, sink=3, recent=16, site=site, decoder_sequences=decoder)
    return on(device, lm).at(site), expected


# The panel varies fastest, so that both panels share one reference.
@pytest.mark.gpu
@pytest.mark.parametrize("panel", ["fast", "full"])
@pytest.mark.parametrize(("family", "site"), distinct_first(SITES))
def test_equals_float64_reference(family: str, site: str, panel: str, device: torch.device) -> None:
    lm, expected = measured_slowly(family, site, device)
    decoder: dict[str, object] = {}
    if family in ENCODER_DECODERS:
        decoder_ids = ragged(LENGTHS[::-1], seed=2)[0].to(device)
        decoder = {"decoder_input_ids": decoder_ids, "decoder_lengths": LENGTHS[::-1]}
    lengths = LENGTHS if site == "encoder" or not decoder else LENGTHS[::-1]
    ids = ragged(LENGTHS)[0].to(device)
    stats = headscan.collect(lm, ids, LENGTHS, statistics=panel_names(panel), widths=WIDTHS, **decoder)
    assert list(stats) == list(panel_names(panel))
    for name, values in stats.items():
        assert values.dtype == torch.float32
        for row, length in enumerate(lengths):
            assert_close(values[row], expected[name][row], name, length, device)


@pytest.mark.parametrize("filler", [-100, VOCABULARY, 0])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_padding_has_any_id_and_any_width(family: str, filler: int) -> None:
    lm = make_loaded(family)
    ids, _ = ragged([60, 41])
    expected = headscan.collect(lm, ids, [60, 41])
    assert lm.max_tokens is not None
    wide = torch.full((2, lm.max_tokens + 1), filler)
    wide[0, :60], wide[1, :41] = ids[0], ids[1, :41]
    found = headscan.collect(lm, wide, [60, 41])
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_path_that_cannot_serve_is_refused() -> None:
    ids, _ = ragged([20])
    with pytest.raises(headscan.HeadscanError, match="does not support statistics that need explicit weights"):
        headscan.collect(make_loaded("llama"), ids, statistics=["confidence"], path="fused")
    with pytest.raises(headscan.HeadscanError, match="does not support this model"):
        headscan.collect(make_loaded("gemma2-softcap"), ids, path="fused")
    with pytest.raises(headscan.HeadscanError, match="computes its own weights"):
        headscan.collect(make_loaded("gptj"), ids, path="fused")
    with pytest.raises(headscan.HeadscanError, match="unknown attention path 'flash'"):
        headscan.collect(make_loaded("llama"), ids, path="flash")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "sink", "recent"), [(5, 4, 256), (64, 1, 1), (65, 7, 8), (130, 9, 4), (131, 4, 64), (97, 40, 5)]
)
def test_masses_for_odd_widths(length: int, sink: int, recent: int) -> None:
    lm = make_loaded("llama")
    ids, sequences = ragged([length, length // 2])
    widths = headscan.MassWidths(sink=sink, recent=recent)
    names = ["sink_mass", "recent_mass", "distant_mass"]
    stats = headscan.collect(lm, ids, [length, length // 2], widths=widths, statistics=names)
    expected = reference(lm.model, "llama", sequences, sink=sink, recent=recent)
    for name in names:
        torch.testing.assert_close(stats[name].double(), expected[name], rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(sum(stats.values()), torch.ones_like(stats["sink_mass"]), rtol=0, atol=1e-5)


def test_measuring_leaves_the_model_as_it_was() -> None:
    lm = make_loaded("llama")
    ids, _ = ragged([20])
    before = lm.model(input_ids=ids).logits
    headscan.collect(lm, ids)
    assert lm.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
    assert not any(module in SESSIONS for module in lm.model.modules())
    assert torch.equal(lm.model(input_ids=ids).logits, before)


def halves() -> list[Any]:
    """Return every family in both dtypes; one in six is fast, in one dtype."""
    dtypes = (torch.bfloat16, torch.float16)
    fast = {(family, dtypes[number % 2]) for number, family in enumerate(list(FAMILIES)[::6])}
    cells = [(dtype, family) for dtype in dtypes for family in FAMILIES]
    return [
        pytest.param(family, dtype, marks=() if (family, dtype) in fast else pytest.mark.slow)
        for dtype, family in cells
    ]


def runs_fused(lm: LoadedModel) -> bool:
    try:
        headscan.collect(lm, ragged([5])[0].to(lm.device), statistics=["entropy"], path="fused")
    except UnsupportedModelError:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "dtype"), halves())
def test_half_precision_models_are_measured_in_float32(family: str, dtype: torch.dtype, device: torch.device) -> None:
    lm = make_loaded(family, dtype=dtype)
    lengths = [150, 20, 90]
    ids, sequences = ragged(lengths)
    expected = reference(lm.model, family, sequences, sink=3, recent=16)
    lm = on(device, lm)
    assert runs_fused(lm) == runs_fused(make_loaded(family))  # a GPU's kernels serve what a CPU's serve
    stats = headscan.collect(lm, ids.to(device), lengths, widths=WIDTHS)
    for name, values in stats.items():
        assert values.dtype == torch.float32
        error = (values.double() - expected[name]).abs()
        if STATISTICS[name].unit != "share":
            error = error / expected[name].abs()
        assert error.nanmean() < HALF_BOUND * torch.finfo(dtype).eps, name


def test_layer_normalised_scores_are_per_sequence() -> None:
    lm = make_loaded("llama")
    ids, _ = ragged([40, 30])
    stats = headscan.collect(lm, ids, [40, 30])
    for name, declared in SCORES.items():
        scores = headscan.score(stats, name)
        assert scores.shape == (2, *lm.grid.shape)
        if declared.over == "layer" and declared.normaliser == declared.statistic:
            torch.testing.assert_close(scores.mean(-1), torch.ones(2, lm.grid.num_layers))
    last = headscan.score(stats, "last_output_norm_ln")
    torch.testing.assert_close(last, stats["last_output_norm"] / stats["output_norm"].mean(-1, keepdim=True))
    own = headscan.score(stats, "last_output_norm_hn")
    torch.testing.assert_close(own, stats["last_output_norm"] / stats["output_norm"])


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gptj"])
def test_nonfinite_statistics_are_named_and_never_returned(family: str) -> None:
    lm = make_loaded(family)
    ids, _ = ragged([30, 20])
    ids[ids == 12] = 11
    ids[1, 0] = 12
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[12] = float("inf")  # one sequence meets it, the other does not
    with pytest.raises(NotFiniteError, match=r"in layer 0, sequence 1 of the batch.*keep_nonfinite"):
        headscan.collect(lm, ids, [30, 20])
    for name in ("learned_sink_mass", "argmax_offsets"):
        with pytest.raises(NotFiniteError, match=f"{name} is not finite"):
            headscan.collect(lm, ids, [30, 20], statistics=[name])
    clean = headscan.collect(lm, ids[:1], [30], statistics=FULL)
    kept = headscan.collect(lm, ids, [30, 20], statistics=FULL, keep_nonfinite=True)
    for name, values in kept.items():
        torch.testing.assert_close(values[0], clean[name][0], rtol=1e-5, atol=1e-6, equal_nan=True)
        assert values[1].flatten(2).isnan().any(2).all() if name in PROFILES else not values[1].isfinite().any(), name


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 2 ** (DISTANCE_BINS - 2) + 3])
def test_distances_fall_into_doubling_bins(size: int) -> None:
    distance = np.arange(size)
    bins = np.minimum(np.frexp(distance)[1], DISTANCE_BINS - 1)  # the number of bits of each distance
    expected = torch.from_numpy(np.bincount(bins, distance + 1.0, DISTANCE_BINS))
    assert torch.equal(doubling_sums(torch.arange(1, size + 1).double()), expected)


def test_received_weight_is_summed_in_a_wider_dtype() -> None:
    received = torch.ones(1, 1, 32)
    received[..., 16] = 2.0**24  # one more is too little for float32
    one = torch.ones(1, dtype=torch.long)
    request = AttentionRequest(frozenset({"received_by_position"}), one, one, WIDTHS)
    found = weight_statistics(CallNumbers({}, {"received": received}, request, Geometry(32, 32, True, False)))[
        "received_by_position"
    ]
    assert found.dtype == torch.float32
    assert found[0, 0, :7].tolist() == [1, 1, 2, 4, 8, 2**24 + 16, 0]


def test_explicit_weights_are_taken_without_a_look_at_a_number() -> None:
    """A GPU would be waited for at each; on the meta device there are none."""
    lengths, ignored = (
        torch.ones(2, dtype=torch.long, device="meta"),
        torch.zeros(2, 6, dtype=torch.bool, device="meta"),
    )
    request = AttentionRequest(EXPLICIT, lengths, lengths, WIDTHS, key_masks={"sinks": ignored})
    tally = WeightTally(request, Geometry(6, 6, True, False))
    for first_query, first_key in ((0, 0), (3, 1)):
        weights = torch.empty(2, 3, 3, 3 + first_query - first_key, device="meta")
        tally.add(weights, first_query, first_key)
    found = tally.numbers()
    assert found.per_query["confidence"].shape == (2, 3, 6)
    assert found.sums["weight_by_offset"].shape == (2, 3, 11)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_numbers_of_a_block_equal_their_definitions(seed: int, device: torch.device) -> None:
    """Any position of a block, more queries than keys included; rows that are NaN, and padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    S = draw(1, 40)
    first_query, first_key = draw(0, S - 1), draw(0, S - 1)
    R, C = draw(1, S - first_query), draw(1, S - first_key)
    widths = headscan.MassWidths(sink=draw(1, 6), recent=draw(1, 12))
    wide = torch.rand(2, 3, R + 3, C + 2, generator=generator, dtype=torch.float64)
    if seed % 3 == 0:
        wide[0, 1, draw(0, R - 1)] = float("nan")
    weights = wide[:, :, 1 : R + 1, :C] if seed % 2 else wide[:, :, 1 : R + 1, :C].contiguous()
    lengths = torch.tensor([draw(1, S), S])
    ignored = torch.rand(2, S, generator=generator) < 0.3
    normalised = seed % 5 == 0
    request = AttentionRequest(frozenset(), lengths, lengths, widths, key_masks={"sinks": ignored}).on(device)
    unpadded = first_query + R <= request.unpadded_queries
    assert unpadded == (first_query + R <= int(lengths.min()))
    block = WeightBlock(weights.to(device), first_query, first_key, request, normalised, unpadded)

    q, k = torch.arange(first_query, first_query + R)[:, None], torch.arange(first_key, first_key + C)

    def weight_on(keys: Tensor) -> Tensor:
        return torch.where(keys, weights, 0.0).sum(-1)

    finite = weights.sum(-1).isfinite()
    terms = torch.where(weights == 0, 0.0, -weights * weights.log())
    expected = {
        "first_token_weight": weight_on(k == 0),
        "self_weight": weight_on(k == q),
        "previous_token_weight": weight_on(k == q - 1),
        "sink_mass": weight_on(k < widths.sink),
        "recent_mass": weight_on(((q - k).abs() < widths.recent) & (k >= widths.sink)),
        "weight_sum": torch.where(finite, 1.0, float("nan")) if normalised else weights.sum(-1),
        "confidence": torch.where(ignored[:, None, None, k] & ~weights.isnan(), 0.0, weights).amax(-1),
        "entropy": terms.sum(-1),
        "argmax_offset": torch.where(finite, k[weights.argmax(-1)] - q[:, 0], float("nan")),
    }
    assert expected.keys() == QUERY_NUMBERS.keys()
    for name, values in expected.items():
        found = QUERY_NUMBERS[name].of_block(block)
        torch.testing.assert_close(found.cpu(), values.double(), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        assert found.untyped_storage().data_ptr() != block.weights_BHRC.untyped_storage().data_ptr(), name

    real = torch.where((q[:, 0] < lengths[:, None])[:, None, :, None], weights, 0.0)
    by_key, by_offset = torch.zeros(2, 3, S).double(), torch.zeros(2, 3, 2 * S - 1).double()
    for column in range(C):
        by_key[..., first_key + column] = real[..., column].sum(-1)
        for row in range(R):
            by_offset[..., first_key + column - (first_query + row) + S - 1] += real[..., row, column]
    for of_queries, values in ((Received(), by_key), (WeightByOffset(), by_offset)):
        total = of_queries.zeros(block, Geometry(S, S, False, False))
        of_queries.add(total, block)
        torch.testing.assert_close(total.cpu(), values, equal_nan=True, msg=lambda m, n=of_queries.name: f"{n}: {m}")
