"""The demo model answers recall questions with its induction heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from statistics import mean, median

import pytest

import headscan
from headscan.ablation.masks import HeadMask
from headscan.demo import MODEL_FOLDER
from headscan.engine.answer import AnsweringSettings, answer
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.texts.recall_tasks import RecallQuestion, grade, recall_questions


def correct(
    lm: headscan.LoadedModel, questions: Sequence[RecallQuestion], mask: HeadMask | None = None
) -> dict[str, float]:
    """Mean grade (0 to 1) of each family."""
    requests = tuple(request for question in questions for request in question.requests)
    (responses,) = answer(lm, requests, [mask], AnsweringSettings(4096, share_prefixes=True))
    answers = iter(responses.values)
    grades = defaultdict(list)
    for question in questions:
        row = grade(question, [next(answers) for _ in question.requests])
        grades[question.task.partition("@")[0]].append(row["correct"])
    return {name: mean(found) for name, found in grades.items()}


@pytest.mark.slow
def test_the_demo_model_recalls_with_its_induction_heads_and_hardly_misses_as_many_others() -> None:
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    plan = RecallQuestions(lengths=(256,), questions=36)
    questions = recall_questions(lm.require_tokenizer(), plan, lm.max_tokens, bos="auto")
    baseline = correct(lm, questions)
    assert baseline["needle"] > 0.5  # chance is 0.25
    assert baseline["copying"] > 0.35
    induction = headscan.probe(lm, ["induction_score"])["induction_score"]
    ranked = [divmod(head, lm.grid.shape[1]) for head in induction.flatten().argsort(descending=True).tolist()]
    without = correct(lm, questions, HeadMask(ranked[:4]))
    assert without["needle"] < 0.4
    assert without["copying"] < 0.1
    # The median, for a few random masks hit what induction rests on: a previous-token head.
    masks = [HeadMask(Random(seed).sample([*lm.grid.heads()], 4)) for seed in range(5)]
    controls = [correct(lm, questions, mask) for mask in masks]
    for name in ("needle", "copying"):
        assert median(control[name] for control in controls) > without[name] + 0.2
