"""Values of criteria against plain loops over sequences and heads."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import headscan
from headscan.ablation.masks import HeadMask
from headscan.catalog import IMPORTANCE_WEIGHT, IMPORTANCES, PROMPT_IMPORTANCE, TermMean
from headscan.errors import PruningError
from headscan.gradients.head_importance import default_loss
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.head_values import criterion_inputs, head_values, ranked
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded

REMOVED = (headscan.Head(0, 1), headscan.Head(2, 3))


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return make_loaded("llama")


def one_by_one(lm: LoadedModel, removed: tuple[headscan.Head, ...]) -> list[tuple[Tensor, int]]:
    texts = random_texts(lm)
    return [(ids[None, :n], n) for ids, n in zip(texts.ids, texts.lengths.tolist(), strict=True)]


@pytest.mark.parametrize(("family", "removed"), [("llama", ()), ("llama", REMOVED), ("bert", ())])
def test_scores_are_means_over_sequences_with_the_inactive_end_first(
    family: str, removed: tuple[headscan.Head, ...]
) -> None:
    lm = make_loaded(family)  # scores need no loss, which an encoder without a mask token lacks
    found = head_values(lm, random_texts(lm), ["output_norm_ln", "first_token_weight"], removed)
    sums = {name: torch.zeros(lm.grid.shape, dtype=torch.float64) for name in found}
    texts = one_by_one(lm, removed)
    for ids, _ in texts:
        with headscan.intervene(lm, HeadMask(removed)):
            statistics = headscan.collect(lm, ids)
        for name in found:
            sums[name] += headscan.score(statistics, name)[0] / len(texts)
    assert torch.allclose(found["output_norm_ln"], sums["output_norm_ln"], atol=1e-6)
    assert torch.allclose(found["first_token_weight"], -sums["first_token_weight"], atol=1e-6)


def test_importances_follow_their_formulas(lm: LoadedModel) -> None:
    found = head_values(
        lm, random_texts(lm), ["importance", "importance_ln", "importance_entropy", "sequence_importance"]
    )
    own, by_sequence, relative = (torch.zeros(lm.grid.shape, dtype=torch.float64) for _ in range(3))
    texts = one_by_one(lm, ())
    for ids, length in texts:
        each = headscan.importance(lm, ids)
        own += each["importance"][0] / len(texts)
        by_sequence += each["gate_gradient"][0].abs() / len(texts)
        relative += each["entropy"][0] / math.log(length) / len(texts)

    def scaled(values: Tensor) -> Tensor:
        return (values - values.min()) / (values.max() - values.min())

    combined = IMPORTANCE_WEIGHT * scaled(own) + (1 - IMPORTANCE_WEIGHT) * (1 - scaled(relative))
    assert torch.allclose(found["importance"], own, rtol=1e-4)
    assert torch.allclose(found["sequence_importance"], by_sequence, rtol=1e-4)
    assert torch.allclose(found["importance_ln"], own / own.norm(dim=1, keepdim=True), rtol=1e-4)
    assert torch.allclose(found["importance_entropy"], combined, atol=1e-4)


def test_every_mean_that_a_term_names_is_measured(lm: LoadedModel) -> None:
    ids = one_by_one(lm, ())[0][0]
    inputs = criterion_inputs(lm, {}, default_loss(lm, ids), list(IMPORTANCES))
    assert {*(name for _, name, _ in inputs), PROMPT_IMPORTANCE} == set(get_args(TermMean))


def test_importance_on_recall_prompts_is_the_larger_of_both_over_their_means(lm: LoadedModel) -> None:
    texts, prompts = random_texts(lm), random_texts(lm, sequences=6, seed=1)
    found = head_values(lm, texts, ["importance", "importance_recall"], REMOVED, prompts=prompts)
    alone = [found["importance"], head_values(lm, prompts, ["importance"], REMOVED)["importance"]]
    expected = torch.maximum(*(values / values.mean() for values in alone))
    assert torch.allclose(found["importance_recall"], expected)
    assert len({tuple(ranked(values)) for values in (found["importance_recall"], *alone)}) == 3
    with pytest.raises(PruningError, match="importance_recall needs recall prompts"):
        head_values(lm, texts, ["importance_recall"])


@torch.no_grad()
def test_effects_are_divergences_from_the_original(lm: LoadedModel) -> None:
    found = head_values(lm, random_texts(lm), ["effect"], REMOVED)["effect"]
    texts = one_by_one(lm, REMOVED)
    for head in [(0, 0), (1, 2), (2, 3), (2, 1)]:
        total, tokens = 0.0, 0
        for ids, length in texts:
            expected = lm.model(ids).logits[:, :-1].log_softmax(-1)
            with headscan.intervene(lm, HeadMask({*REMOVED, head})):
                changed = lm.model(ids).logits[:, :-1].log_softmax(-1)
            total += float(F.kl_div(changed, expected, reduction="sum", log_target=True))
            tokens += length - 1
        assert float(found[head]) == pytest.approx(total / tokens, rel=1e-3)


def test_ranking_leaves_out_missing_and_removed_heads() -> None:
    values = torch.tensor([[3.0, 1.0, float("nan")], [1.0, 2.0, 0.0]])
    assert ranked(values, [headscan.Head(1, 2)]) == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_an_unknown_criterion_is_named(lm: LoadedModel) -> None:
    with pytest.raises(PruningError, match="unknown criterion 'magic'"):
        head_values(lm, random_texts(lm), ["magic"])
