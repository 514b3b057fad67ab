"""All aspects of a verdict together, in simulations: how often an arm of known losses is called safe, and losing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headscan.store.records import ArmKind
from headscan.store.tables import LOSS
from headscan.store.verdict_limits import MAX_LOSS, QUESTIONS_PER_TEXT
from headscan.verdicts.answer_sheets import BENCHMARK, AnswerSheets, ArmRecord, Scope
from headscan.verdicts.arm_verdict import ArmVerdict, Outcome
from headscan.verdicts.judge import arm_verdict
from headscan.verdicts.metrics import RATES, TaskMetric, rate_increase

NEEDLE, COPYING = Scope("needle", True), Scope("copying", True)
#: Share of the answers that an arm changes in each direction, beyond what it loses.
CHANGED = 0.02


def sheets(tasks: int, questions: int, recall_texts: int) -> AnswerSheets:
    """Tasks of four choices with ``questions`` each, and two recall families of four questions a text."""
    recall = QUESTIONS_PER_TEXT * recall_texts
    task = np.repeat([*range(tasks), tasks, tasks + 1], [questions] * tasks + [recall] * 2)
    recall_text = np.arange(recall) // QUESTIONS_PER_TEXT
    text = np.concatenate([np.tile(np.arange(questions), tasks), recall_text, recall_text])
    scopes = {BENCHMARK: task < tasks, NEEDLE: task == tasks, COPYING: task == tasks + 1}
    if tasks > 1:
        scopes |= {Scope(f"task {index}", False): task == index for index in range(tasks)}
    return AnswerSheets(task, text, np.where(task > tasks, np.nan, 0.25), {}, scopes)


def simulated(rng: np.random.Generator, asked: AnswerSheets, texts: int, *, points: float, rise: float) -> ArmVerdict:
    """Judge an arm that truly loses ``points`` of the accuracy and of both recall families, and raises the loss of text
    by ``rise`` nats per token. The baseline is right on 60 % of the questions, finds 90 % of the needles and copies
    half of the tokens.
    """
    accuracy = np.where(asked.scopes[BENCHMARK], 0.6, 0.9)
    baseline = (rng.random(len(accuracy)) < accuracy).astype(float)
    lost, gained = (points / 100 + CHANGED) / accuracy, CHANGED / (1 - accuracy)
    drawn = rng.random(len(accuracy))
    arm = np.where(baseline == 1, drawn >= lost, drawn < gained).astype(float)
    copying = asked.scopes[COPYING]
    ease = np.repeat(rng.beta(2, 2, copying.sum() // QUESTIONS_PER_TEXT), QUESTIONS_PER_TEXT)
    baseline[copying] = rng.binomial(16, ease) / 16  # of 16 tokens
    arm[copying] = rng.binomial(16, ease * (1 - points / 100 / 0.5)) / 16
    tokens = rng.integers(200, 600, texts).astype(float)
    log_likelihoods = -2.5 * tokens
    rises = rng.normal(rise, 0.03, texts)
    increase = rate_increase(RATES[LOSS], log_likelihoods, log_likelihoods - rises * tokens, tokens, np.arange(texts))
    return arm_verdict(
        ArmRecord(name="arm", kind=ArmKind.MASK),
        {scope: asked.compare(scope, baseline, arm) for scope in asked.scopes},
        metrics=(TaskMetric("text", LOSS, None, None, increase),),
    )


@pytest.mark.parametrize(
    ("tasks", "questions", "recall_texts", "texts", "safe"),
    [(5, 400, 100, 64, 0.45), (57, 35, 100, 64, 0.45), (1, 381, 100, 6, 0.0), (1, 400, 6, 6, 0.0)],
)
def test_an_arm_without_losses_hardly_ever_loses(
    tasks: int, questions: int, recall_texts: int, texts: int, safe: float
) -> None:
    rng, asked, runs = np.random.default_rng(0), sheets(tasks, questions, recall_texts), 200
    outcomes = Counter(simulated(rng, asked, texts, points=0, rise=0).outcome for _ in range(runs))
    assert outcomes[Outcome.LOSES] <= 0.04 * runs  # 6 recall texts: 1.6 % of 2,000 simulations; the others 0.3 %
    assert outcomes[Outcome.SAFE] >= safe * runs if safe else outcomes[Outcome.SAFE] == 0  # 6 texts are too few


@pytest.mark.parametrize(
    ("tasks", "questions", "recall_texts", "texts"), [(5, 400, 100, 64), (57, 35, 100, 64), (1, 400, 6, 6)]
)
def test_an_arm_at_every_limit_may_lose_by_each(tasks: int, questions: int, recall_texts: int, texts: int) -> None:
    """Each aspect has its own 2.5 %: intervals are not widened for the number of aspects. To be safe, an arm must pass
    in all of them, so a wrong *safe* is rarer than in one.
    """
    rng, asked, runs = np.random.default_rng(0), sheets(tasks, questions, recall_texts), 300
    outcomes = Counter(simulated(rng, asked, texts, points=1, rise=MAX_LOSS).outcome for _ in range(runs))
    assert (recall_texts > 6) <= outcomes[Outcome.LOSES] <= 0.15 * runs
    assert outcomes[Outcome.SAFE] <= 0.01 * runs


def test_an_arm_at_one_limit_is_rarely_safe() -> None:
    """Enough questions to show that an arm without losses is safe, and a rise of the text's loss at its limit."""
    rng, asked, runs = np.random.default_rng(0), sheets(5, 400, 100), 300
    verdicts = [simulated(rng, asked, 64, points=0, rise=MAX_LOSS) for _ in range(runs)]
    assert sum(verdict.is_safe for verdict in verdicts) <= 0.03 * runs
