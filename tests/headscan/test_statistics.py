"""Every statistic on every family against the float64 reference; both paths; independence of the batch."""

from __future__ import annotations

import pytest
import torch

import headscan
from headscan.catalog import SCORES, STATISTICS
from tests.headscan.families import FAMILIES, VOCABULARY, make_loaded
from tests.headscan.reference import reference

#: Relative 1e-5. The floor is for numbers that are zero by construction or nearly: a distant mass in a short sequence,
#: or the entropy of a sequence of two tokens, where float32 scores leave an absolute error and nothing averages it out.
RTOL, ATOL, ATOL_TINY = 1e-5, 2e-7, 5e-6


def ragged(lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    return ids, [row[:length] for row, length in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["auto", "blockwise"])
def test_equals_float64_reference(family: str, path: str) -> None:
    lm = make_loaded(family)
    lengths = [150, 1, 37, 2, 90]
    ids, sequences = ragged(lengths)
    widths = headscan.MassWidths(sink=3, recent=16)
    stats = headscan.collect(lm, ids, lengths, widths=widths, path=path)
    expected = reference(lm.model, family, sequences, sink=3, recent=16)
    assert list(stats) == list(STATISTICS)
    for name in STATISTICS:
        assert stats[name].dtype == torch.float32
        for row, length in enumerate(lengths):
            torch.testing.assert_close(
                stats[name][row].double(),
                expected[name][row],
                rtol=RTOL,
                atol=ATOL if length > 2 else ATOL_TINY,
                equal_nan=True,
                msg=lambda m, n=name, t=length: f"{n} at {t} tokens: {m}",
            )


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


def test_no_number_depends_on_the_rest_of_the_batch() -> None:
    lm = make_loaded("qwen3")
    lengths = [80, 33, 61]
    ids, sequences = ragged(lengths)
    together = headscan.collect(lm, ids, lengths)
    for row, sequence in enumerate(sequences):
        alone = headscan.collect(lm, sequence[None])
        for name in STATISTICS:
            torch.testing.assert_close(together[name][row], alone[name][0], rtol=1e-5, atol=1e-6)
    noisy = ids.clone()
    for row, length in enumerate(lengths):
        noisy[row, length:] = 7
    for name, values in headscan.collect(lm, noisy, lengths).items():
        torch.testing.assert_close(values, together[name], rtol=1e-6, atol=1e-7)


def test_measuring_leaves_the_model_as_it_was() -> None:
    lm = make_loaded("llama")
    ids, _ = ragged([20])
    before = lm.model(input_ids=ids).logits
    headscan.collect(lm, ids)
    assert lm.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
    assert not any(hasattr(module, "_headscan_session") for module in lm.model.modules())
    assert torch.equal(lm.model(input_ids=ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured_in_float32(dtype: torch.dtype) -> None:
    lm = make_loaded("llama", dtype=dtype)
    lengths = [70, 20]
    ids, sequences = ragged(lengths)
    stats = headscan.collect(lm, ids, lengths)
    expected = reference(lm.model, "llama", sequences, sink=4, recent=256)
    # The reference runs the same weights in float64; what differs is the rounding of the model's own activations.
    bound = 8 * torch.finfo(dtype).eps
    for name in ("output_norm", "value_norm", "projected_output_norm", "self_weight"):
        assert stats[name].dtype == torch.float32
        relative = ((stats[name].double() - expected[name]) / expected[name]).abs()
        assert relative.mean() < bound, name


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
