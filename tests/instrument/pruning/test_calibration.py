"""Calibration on texts and recall prompts together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import headscan
from headscan.demo import MODEL_FOLDER
from headscan.errors import SequenceError
from headscan.gradients.losses import NextTokenLoss
from headscan.models.forward_inputs import before_last, real_tokens
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.damage_curve import layer_moments
from headscan.pruning.edited_model import NO_EDITS, Divergence, Edits, edited, logits
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.repair import divergences, repair
from headscan.pruning.selection_settings import SelectionConfig
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.settings.saving_settings import RecallPrompts
from headscan.steps.prune.calibration_texts import CalibrationPrompts
from headscan.steps.prune.held_out_losses import as_calibration
from headscan.texts.recall_tasks import recall_questions, recall_series
from headscan.texts.stdlib_files import held_out_files, seen_modules
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded


def _prompts(lm: LoadedModel, count: int, seed: int) -> Calibration:
    texts = random_texts(lm, sequences=count, tokens=20, seed=seed)
    scoring_BN = before_last(texts.lengths, torch.full((count,), 3), texts.ids.shape[1])
    return Calibration(texts.ids, texts.lengths, texts.batch_tokens, scoring_BN)


def test_prompts_stand_evenly_among_texts_and_share_a_weight() -> None:
    lm = make_loaded("llama")
    texts, prompts = random_texts(lm, sequences=16), [_prompts(lm, 4, 1), _prompts(lm, 8, 2)]
    mixed = texts.with_prompts(prompts, 0.5)
    with pytest.raises(SequenceError, match="weights already"):
        mixed.with_prompts(prompts, 0.5)
    assert prompts[0].first(1).split(5)[1].predictions.tolist() == [3]  # a prompt is not cut
    is_prompt = mixed.predictions == 3
    weight = (mixed.weights * mixed.predictions)[is_prompt]
    assert float(weight.sum()) == pytest.approx(0.5 * float((texts.lengths - 1).sum()))
    assert mixed.tokens == texts.tokens + sum(each.tokens for each in prompts)
    assert int(is_prompt[:14].sum()) == int(is_prompt[14:].sum()) == 6
    assert torch.equal(mixed.ids[~is_prompt], texts.ids)


def test_divergences_and_moments_weigh_texts_and_prompts() -> None:
    lm = make_loaded("llama")
    texts, prompts = random_texts(lm, sequences=10), [_prompts(lm, 4, 1), _prompts(lm, 8, 2)]
    mixed = texts.with_prompts(prompts, 0.5)
    edits = Edits((headscan.Head(0, 1), headscan.Head(1, 5)))
    one, (two, three) = Divergence(lm, texts).of(edits), (Divergence(lm, each).of(edits) for each in prompts)
    assert Divergence(lm, mixed).of(edits) == pytest.approx((one + 0.5 * (two + three) / 2) / 1.5, rel=1e-4)
    # A weight of all but nothing leaves the derivatives of the texts.
    plain = layer_moments(lm, texts)
    alone = layer_moments(lm, texts.with_prompts(prompts, 1e-9))
    for layer, moments in plain.items():
        ratio = alone[layer].fisher / moments.fisher
        torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.mean())), rtol=1e-3, atol=0.0)


def test_counted_predictions_can_stand_anywhere() -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=6, tokens=20, seed=3)
    scoring_BN = torch.rand(texts.ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    scoring_BN &= real_tokens(texts.lengths - 1, texts.ids.shape[1])
    scoring_BN[:, 0] = True  # one or more in each sequence
    calibration = Calibration(texts.ids, texts.lengths, 64, scoring_BN, torch.arange(1.0, 7.0))
    edits = Edits((headscan.Head(0, 1), headscan.Head(1, 5)))
    summed, weight = 0.0, 0.0
    for row, (ids, length) in enumerate(zip(texts.ids, texts.lengths.tolist(), strict=True)):
        places = scoring_BN[row].nonzero().flatten().tolist()
        with torch.no_grad():
            whole = lm.model(ids[None, :length], use_cache=False).logits[0].double().log_softmax(-1)
            with edited(lm, edits):
                part = lm.model(ids[None, :length], use_cache=False).logits[0].double().log_softmax(-1)
        summed += (row + 1) * float(((whole - part) * whole.exp()).sum(-1)[places].sum())
        weight += (row + 1) * len(places)
        loss = NextTokenLoss.at(ids[None, :length], [length], scoring_BN[row : row + 1, :length], summed=True)
        expected = -whole[places, ids[[place + 1 for place in places]]].sum()
        torch.testing.assert_close(loss.losses(lm)[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert calibration.predictions.tolist() == scoring_BN.sum(1).tolist()
    assert Divergence(lm, calibration).of(edits) == pytest.approx(summed / weight, rel=1e-4)
    assert divergences(lm, calibration, [edits])[0] == pytest.approx(summed / weight, rel=1e-4)


@pytest.mark.slow
def test_recall_prompts_keep_recall_at_the_same_loss_of_text() -> None:
    """On the demo model, with 19 of 48 heads removed and repaired."""
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    texts = _texts(lm, sorted(seen_modules()), 24)
    series = CalibrationPrompts("needle", recall_series(lm.require_tokenizer(), 512, 16, 0)["needle"])
    needles = series.as_calibration(8192)
    judged = {"text": _texts(lm, sorted(held_out_files()), 12), "needle": _needles(lm, 16)}

    def costs(calibration: Calibration) -> dict[str, float]:
        config = SelectionConfig(moment_tokens=4096, curve_tokens=2048, tries=0)
        removed = HeadSelection(lm, calibration, config=config).choose(count=19)
        edits = Edits(removed, repair(lm, calibration, removed))
        return {name: _loss(lm, each, edits) - _loss(lm, each, NO_EDITS) for name, each in judged.items()}

    alone, mixed = costs(texts), costs(texts.with_prompts([needles], RecallPrompts().weight))
    assert alone["needle"] > 0.4
    assert mixed["needle"] < 0.25 * alone["needle"]
    assert mixed["text"] < 1.1 * alone["text"]


def _texts(lm: LoadedModel, paths: list[Path], count: int) -> Calibration:
    tokenizer = lm.require_tokenizer()
    rows = []
    for path in random.Random(0).sample(paths, len(paths)):
        ids = tokenizer(path.read_text(errors="replace")[:20000], add_special_tokens=False).input_ids
        rows += [[0, *ids[:511]]] if len(ids) >= 511 else []
        if len(rows) == count:
            break
    return Calibration(torch.tensor(rows), torch.full((count,), 512))


def _needles(lm: LoadedModel, count: int) -> Calibration:
    """Return needle questions with their answers."""
    plan = RecallQuestions(lengths=(511,), questions=count)
    questions = recall_questions(lm.require_tokenizer(), plan, 512, bos="auto")
    needles = [each for each in questions if each.task.startswith("needle")]
    return as_calibration([each.requests[each.answer or 0] for each in needles], 8192)


@torch.no_grad()
def _loss(lm: LoadedModel, texts: Calibration, edits: Edits) -> float:
    total = 0.0
    for batch in texts.batches(lm.device):
        with edited(lm, edits):
            found = logits(lm, batch)
        targets = batch.ids[:, 1:][batch.scoring_BN[:, :-1]]
        total += float(torch.nn.functional.cross_entropy(found, targets, reduction="sum"))
    return total / int(texts.predictions.sum())
