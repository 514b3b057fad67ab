"""Damage curves that are measured only where a choice needs them."""

from __future__ import annotations

from itertools import chain, product

import pytest

from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.damage_curve import DamageCurve, layer_moments
from headscan.pruning.edited_model import NO_EDITS, Divergence
from headscan.pruning.head_selection import SelectionStage, find_units
from headscan.pruning.repair import RepairConfig, Repaired, repaired_model
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded


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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "llama-mha"])
def test_a_stage_finds_what_measuring_everything_finds(architecture: str) -> None:
    lm = make_loaded(architecture)
    texts = random_texts(lm)
    original = Repaired(NO_EDITS, {})
    divergence = Divergence(lm, texts)
    first = SelectionStage(lm, layer_moments(lm, texts), divergence, find_units(lm.grid, "head"), original, 5)
    assert [first.heads(first.choose(n)) for n in range(6)] == _cheapest(lm, original, 5)
    before = repaired_model(lm, texts, first.heads(first.choose(5)), RepairConfig(("o",)), all_layers=True)
    moments = layer_moments(lm, texts, before.edits)
    further = SelectionStage(lm, moments, divergence, find_units(lm.grid, "head"), before, 3)
    assert [further.heads(further.choose(n)) for n in range(4)] == _cheapest(lm, before, 3)


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
