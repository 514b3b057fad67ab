"""Ablated heads output zero, their mean over a corpus, or what they output on another text."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.intervention import ZERO, Ablation, LayerwiseAblation, Replacement, StoredOutputs
from headscan.architectures import SITES, VOCABULARY
from headscan.attention.hooks import output_hook
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, SequenceError
from headscan.models.loaded_model import LoadedModel
from tests.small_models import distinct_first, make_loaded

LENGTHS = [30, 12, 21]
HEADS = [(0, 1), (2, 5), (2, 0)]


def ids_of(sequences: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(2, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(lm: LoadedModel, ids: Tensor) -> Tensor:
    more = {"decoder_input_ids": ids} if lm.is_encoder_decoder else {}
    with torch.no_grad():
        return lm.model(input_ids=ids, use_cache=False, **more).logits


def outputs_of(lm: LoadedModel, ids: Tensor) -> dict[int, Tensor]:
    """Return the heads' outputs (N, H, D) of one text, by layer."""
    found: dict[int, Tensor] = {}

    def keep(site, heads) -> None:
        found[site.layer] = heads[0]

    with output_hook(lm, keep):
        logits_of(lm, ids[None])
    return found


def replaced_logits(lm: LoadedModel, ids: Tensor, output_of: Callable[[int, int, int], Tensor]) -> Tensor:
    """Return logits with ``output_of(row, layer, head)`` in place of the outputs of `HEADS`, one text at a time."""
    rows = []
    for row, text in enumerate(ids):

        def put(site, heads, row=row) -> Tensor:
            heads = heads.clone()
            for layer, head in HEADS:
                if layer == site.layer:
                    heads[0, :, head] = output_of(row, layer, head)
            return heads

        with output_hook(lm, put):
            rows.append(logits_of(lm, text[None])[0])
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "site"), distinct_first(SITES))
def test_a_mean_mask_outputs_the_mean_of_all_real_tokens(family: str, site: str) -> None:
    lm = make_loaded(family).at(site)
    texts = ids_of(3, 30)
    means = headscan.head_means(lm, texts, LENGTHS, batch_tokens=40)
    tokens = [outputs_of(lm, text[:length]) for text, length in zip(texts, LENGTHS, strict=True)]
    expected = {layer: torch.cat([each[layer] for each in tokens]).mean(0) for layer in tokens[0]}
    assert list(means.by_layer) == sorted(expected)
    lists = [text[:length].tolist() for text, length in zip(texts, LENGTHS, strict=True)]
    of_lists = headscan.head_means(lm, lists, batch_tokens=40)
    for layer, mean in expected.items():
        torch.testing.assert_close(means.by_layer[layer], mean, rtol=1e-4, atol=1e-5)
        # Padding differs, and with it the number of tokens that each expert reads together, and rounding.
        torch.testing.assert_close(of_lists.by_layer[layer], mean, rtol=1e-4, atol=1e-5)
    ids = ids_of(2, 20, seed=4)
    with headscan.intervene(lm, headscan.HeadMask(HEADS, means)) as record:
        found = logits_of(lm, ids)
    by_hand = replaced_logits(lm, ids, lambda _, layer, head: means.by_layer[layer][head])
    torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-5)
    assert record.ablated is not None and int(record.ablated.sum()) == 2 * len(HEADS)


def test_a_resampled_mask_outputs_another_text_at_the_same_positions() -> None:
    lm, texts, ids = make_loaded("llama"), ids_of(4, 30), ids_of(3, 20, seed=4)
    samples = headscan.head_samples(lm, texts, [30, 25, 22, 30], layers=(0, 2), batch_tokens=60)
    assert samples.by_layer[0].shape == (4, 22, 6, 8) and set(samples.by_layer) == {0, 2}
    keys = [5, 11, 2**40]
    chosen = [samples.outputs(torch.arange(4)[:, None], torch.zeros(1, 1), [key]).item() for key in keys]
    assert len(set(chosen)) > 1
    own = [outputs_of(lm, text) for text in texts]
    expected = replaced_logits(lm, ids, lambda row, layer, head: own[chosen[row]][layer][:20, head])
    with headscan.intervene(lm, headscan.HeadMask(HEADS, samples), input_keys=keys):
        torch.testing.assert_close(logits_of(lm, ids), expected, rtol=1e-4, atol=1e-5)
    with headscan.intervene(lm, headscan.HeadMask(HEADS, samples), input_keys=keys[1:2]):
        torch.testing.assert_close(logits_of(lm, ids[1:2]), expected[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda v: headscan.HeadRule("output_norm_ln", 1.0, v), None])
def test_rules_and_random_heads_replace_the_heads_that_they_record(make) -> None:
    make = make or (lambda value: headscan.RandomHeads(0.4, 1, value))
    lm, ids = make_loaded("qwen3"), ids_of(3, 20)
    means = headscan.head_means(lm, ids_of(3, 30, seed=5))
    with headscan.intervene(lm, make(means)) as record:
        found = logits_of(lm, ids)
    assert 0.1 < record.ablated_share < 0.9

    def by_hand(site, heads) -> Tensor:
        ablated = record.ablated[:, site.layer, : site.num_attention_heads]
        return torch.where(ablated[:, None, :, None], means.by_layer[site.layer], heads)

    with output_hook(lm, by_hand):
        torch.testing.assert_close(logits_of(lm, ids), found, rtol=1e-4, atol=1e-5)


def test_ablations_name_the_value_that_they_test() -> None:
    lm = make_loaded("llama")
    means, samples = headscan.head_means(lm, ids_of(2, 9)), headscan.head_samples(lm, ids_of(2, 9))
    for make in (
        lambda value: headscan.HeadMask(HEADS, value),
        lambda value: headscan.HeadRule("entropy", 1.0, value),
        lambda value: headscan.RandomHeads(0.5, 0, value),
    ):
        found: list[Ablation] = [make(value) for value in (ZERO, means, samples)]
        assert [each.kind for each in found] == ["zero", "mean", "resample"]
        assert [each.within(0, 3) == each for each in found] == [True] * 3
        assert not found[2].may_share_prefix
        assert not (isinstance(found[2], LayerwiseAblation) and found[2].may_share_rows)
        assert found[0].may_share_prefix == found[1].may_share_prefix
        assert len(set(found)) == 3
    assert headscan.HeadMask(HEADS).kind == "zero" and headscan.HeadMask(HEADS) == headscan.HeadMask(HEADS, ZERO)
    assert headscan.HeadMask(HEADS, means).within(1, 3) == headscan.HeadMask(HEADS[1:], means)


def test_equal_outputs_are_equal_replacements_in_every_process() -> None:
    lm = make_loaded("llama")
    means, again, other = (headscan.head_means(lm, ids_of(2, 9, seed)) for seed in (0, 0, 1))
    assert means == again and hash(means) == hash(again) and means != other
    copy = pickle.loads(pickle.dumps(headscan.HeadMask(HEADS, means)))
    assert copy == headscan.HeadMask(HEADS, means)
    samples = headscan.head_samples(lm, ids_of(2, 9))
    assert samples != headscan.HeadSamples(samples.by_layer, "self", seed=1)
    assert "tensor" not in repr(means)


def test_collected_outputs_are_copies() -> None:
    outputs = {0: torch.zeros(6, 8)}
    means = headscan.HeadMeans(outputs, "self")
    outputs[0].fill_(3)
    assert not means.by_layer[0].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda means: headscan.HeadMeans({0: means.by_layer[0]}, "self"),
            "no mean outputs of layer [12]: they were not collected. Collect",
        ),
        (lambda means: headscan.HeadMeans(means.by_layer, "cross"), "of site 'cross' replace heads of site 'self'"),
        (lambda _: headscan.HeadMeans({0: torch.ones(2, 8), 2: torch.ones(2, 8)}, "self"), r"shape \(2, 8\) \(limit"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(change: Callable[[Replacement], Replacement], words: str) -> None:
    lm = make_loaded("llama")
    wrong = change(headscan.head_means(lm, ids_of(2, 9)))
    for what in (headscan.HeadMask(HEADS, wrong), headscan.HeadRule("entropy", 1.0, wrong)):
        with pytest.raises(InterventionError, match=words), headscan.intervene(lm, what):
            pass


def test_resampling_refuses_long_inputs_caches_and_few_texts() -> None:
    lm, ids = make_loaded("llama"), ids_of(2, 20)
    mask = headscan.HeadMask(HEADS, headscan.head_samples(lm, ids_of(3, 12)))
    with headscan.intervene(lm, mask):
        with pytest.raises(InterventionError, match=r"20 tokens \(limit 12\)"):
            logits_of(lm, ids)
        with pytest.raises(InterventionError, match="resample ablation needs whole inputs"):
            lm.model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
    with pytest.raises(SequenceError, match=r"1 text to draw samples from \(limit 2\)"):
        headscan.head_samples(lm, ids[:1])
    with pytest.raises(HeadscanError, match="seed=-1"):
        headscan.head_samples(lm, ids, seed=-1)
    with pytest.raises(HeadIndexError, match=r"layer 99 has no attention heads. Choose a layer with heads: 0 to 2"):
        headscan.head_samples(lm, ids, layers={0, 99})
    assert issubclass(headscan.HeadSamples, StoredOutputs)
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
