"""Damage curves that are measured only where a choice needs them; moments and subsets against their definitions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import headscan
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.damage_curve import DamageCurve, LayerMoments, best_subsets, layer_moments, repaired_weight
from headscan.pruning.edited_model import NO_EDITS, Divergence, Edits, LayerEdits
from headscan.pruning.head_selection import SelectionStage, find_units
from headscan.pruning.repair import RepairConfig, Repaired, repaired_model
from headscan.pruning.value_repair import ridge
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded, slow


def _cheapest(lm: LoadedModel, before: Repaired, more: int) -> list[tuple[Head, ...]]:
    """Return the best choices by measuring every number in every layer, and trying all combinations."""
    texts = random_texts(lm)
    divergence, units = Divergence(lm, texts), find_units(lm.grid, "head")
    moments = layer_moments(lm, texts, before.edits)
    curves = [DamageCurve(lm, s, moments[s.layer], units[s.layer], before, more) for s in lm.grid.sites]
    for curve in curves:
        candidates = curve.candidates(range(curve.least, curve.least + len(curve.damages)))
        curve.add(candidates, [divergence.of(curve.edits(each)) for each in candidates])
    now = sum(curve.now for curve in curves)
    ranges = [range(curve.least, curve.least + len(curve.damages)) for curve in curves]
    found = []
    for total in range(now, now + more + 1):
        cheapest = min(
            (counts for counts in product(*ranges) if sum(counts) == total),
            key=lambda counts: sum(c.damages[n - c.least] for c, n in zip(curves, counts, strict=True)),
        )
        found.append(tuple(sorted(h for c, n in zip(curves, cheapest, strict=True) for h in c.heads(n))))
    return found


@pytest.mark.parametrize("architecture", ["llama", *slow("gpt2", "llama-mha")])
def test_a_stage_finds_what_measuring_everything_finds(architecture: str) -> None:
    lm = make_loaded(architecture)
    texts = random_texts(lm)
    original = Repaired(NO_EDITS, {})
    divergence = Divergence(lm, texts)
    first = SelectionStage(lm, layer_moments(lm, texts), divergence, find_units(lm.grid, "head"), original, 4)
    assert [first.heads(first.choose(n)) for n in range(5)] == _cheapest(lm, original, 4)
    before = repaired_model(lm, texts, first.heads(first.choose(4)), RepairConfig(("o",)), all_layers=True)
    moments = layer_moments(lm, texts, before.edits)
    further = SelectionStage(lm, moments, divergence, find_units(lm.grid, "head"), before, 2)
    assert [further.heads(further.choose(n)) for n in range(3)] == _cheapest(lm, before, 2)


def test_few_numbers_are_measured() -> None:
    lm = make_loaded("llama")
    texts, measured = random_texts(lm), []

    class Counting(Divergence):
        def of_layers(self, candidates, below=NO_EDITS):  # type: ignore[no-untyped-def]
            measured.extend(chain.from_iterable(candidates.values()))
            return super().of_layers(candidates, below)

    divergence = Counting(lm, texts)
    SelectionStage(
        lm, layer_moments(lm, texts), divergence, find_units(lm.grid, "head"), Repaired(NO_EDITS, {}), 3
    ).choose(3)
    everything = 2 * sum(min(3, site.num_attention_heads) for site in lm.grid.sites)
    assert 0 < len(measured) < everything


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2-softcap"])
def test_moments_equal_those_of_single_sequences(name: str) -> None:
    lm = make_loaded(name)
    texts = random_texts(lm, sequences=7)
    found = layer_moments(lm, texts)
    tokens = int(texts.lengths.sum())
    for site in lm.grid.sites:
        gram, fisher = torch.zeros(48, 48), torch.zeros(48, 48)
        kept: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            kept[:] = [args[0].detach(), out.detach().requires_grad_()]  # noqa: B023 - called before it changes
            return kept[1]  # noqa: B023

        if site.num_attention_heads * site.value_dim != 48:
            gram = torch.zeros(2 * [site.num_attention_heads * site.value_dim])
        handle = lm.module(site.output_projection).register_forward_hook(keep)
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            with torch.enable_grad():
                logits = lm.model(input_ids=ids[None, :length], use_cache=False).logits[0]
                loss = F.cross_entropy(logits[:-1], ids[1:length], reduction="sum")
            (gradient,) = torch.autograd.grad(loss, kept[1])
            inputs, errors = kept[0].reshape(length, -1), gradient.reshape(length, -1)
            gram += inputs.T @ inputs
            fisher += errors.T @ errors
        handle.remove()
        torch.testing.assert_close(found[site.layer].gram, gram / tokens, rtol=1e-4, atol=1e-6)
        expected = fisher / tokens
        torch.testing.assert_close(found[site.layer].fisher, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])  # the attention of bloom cannot be shared
@torch.no_grad()
def test_the_divergence_is_that_of_whole_passes(family: str) -> None:
    lm = make_loaded(family)
    texts = random_texts(lm, sequences=5)
    name = f"{lm.grid.site_of(1).output_projection}.weight"
    weight = lm.model.get_parameter(name)
    changed = weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    # What one model lacks in layer 1, the others have.
    below = Edits((Head(0, 1), Head(1, 2)))
    models = [
        (below, weight.clone()),
        (Edits((Head(0, 1), Head(1, 0), Head(2, 0))), weight.clone()),
        (Edits((Head(0, 1), Head(1, 3)), {name: changed}), changed),
    ]
    candidates = [LayerEdits(edits.removed, partial(replace, edits)) for edits, _ in models]
    found = Divergence(lm, texts).of_layers({1: candidates}, below)[1]
    for value, (edits, replaced) in zip(found, models, strict=True):
        original_weight = weight.clone()
        total, tokens = 0.0, 0
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            original = lm.model(input_ids=ids[None, :length]).logits[0, :-1].log_softmax(-1)
            weight.copy_(replaced)
            with headscan.intervene(lm, headscan.HeadMask(edits.removed)):
                other = lm.model(input_ids=ids[None, :length]).logits[0, :-1].log_softmax(-1)
            weight.copy_(original_weight)
            total += float((original.exp() * (original - other)).sum())
            tokens += length - 1
        assert value == pytest.approx(total / tokens, rel=1e-3)
        assert Divergence(lm, texts).of(edits) == pytest.approx(value, rel=1e-4)


UNITS, WIDTH, OUT = 6, 3, 7


def problem(seed: int) -> tuple[LayerMoments, Tensor, list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, UNITS * WIDTH, generator=generator) @ torch.randn(
        UNITS * WIDTH, UNITS * WIDTH, generator=generator
    )
    gradients = torch.randn(200, OUT, generator=generator) * torch.rand(OUT, generator=generator)
    moments = LayerMoments(inputs.T @ inputs / 200, gradients.T @ gradients / 200)
    weight = torch.randn(OUT, UNITS * WIDTH, generator=generator)
    return moments, weight, [list(range(u * WIDTH, u * WIDTH + WIDTH)) for u in range(UNITS)]


def plain_damage(moments: LayerMoments, weight: Tensor, gone: list[int]) -> float:
    """The definition: the Fisher-weighted error of the removed part, predicted from the rest by least squares."""
    gram, wide = ridge(moments.gram), weight.double()
    kept = [c for c in range(len(gram)) if c not in gone]
    rest = gram[gone][:, kept] @ torch.linalg.inv(gram[kept][:, kept]) @ gram[kept][:, gone] if kept else 0.0
    error = wide[:, gone] @ (gram[gone][:, gone] - rest) @ wide[:, gone].T
    return float(0.5 * (moments.fisher.double() * error).sum())


@pytest.mark.parametrize("seed", range(5))
def test_damages_equal_the_definition_and_the_search_finds_nearly_the_best(seed: int) -> None:
    moments, weight, units = problem(seed)
    found = best_subsets(moments, weight, units, most=UNITS, width=3)
    assert [len(each[0].units) for each in found] == list(range(UNITS + 1))
    exact = 0
    for count, subsets in enumerate(found[1:], 1):
        assert [s.damage for s in subsets] == sorted(s.damage for s in subsets)
        for subset in subsets:
            gone = [c for unit in subset.units for c in units[unit]]
            assert subset.damage == pytest.approx(plain_damage(moments, weight, gone), rel=1e-6)
        every = min(
            plain_damage(moments, weight, [c for u in each for c in units[u]])
            for each in combinations(range(UNITS), count)
        )
        assert subsets[0].damage <= 1.1 * every
        exact += subsets[0].damage <= every * (1 + 1e-9)
    assert exact >= UNITS - 2


def test_the_repaired_weight_minimises_the_error() -> None:
    moments, weight, units = problem(9)
    gone = torch.tensor([c for unit in (1, 4) for c in units[unit]])
    found = repaired_weight(moments.gram, weight, gone).double()
    assert not found[:, gone].any()
    gram = ridge(moments.gram)

    def error(new: Tensor) -> float:
        change = weight.double() - new
        return float((change @ gram * change).sum())

    kept = torch.ones(found.shape, dtype=torch.bool)
    kept[:, gone] = False
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = 1e-3 * torch.randn(found.shape, generator=generator, dtype=torch.float64)
        assert error(found + step * kept) > error(found)
