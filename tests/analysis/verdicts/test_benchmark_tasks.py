"""Tasks one by one: a real loss of one shows, and of many tasks none fails by chance."""

from __future__ import annotations

import numpy as np
import pytest

from headscan.analysis.verdicts.answer_sheets import Scope
from headscan.analysis.verdicts.benchmark_tasks import least_visible_loss, task_verdicts
from headscan.analysis.verdicts.paired import PairedDifference, compare

#: As in MMLU: 57 subjects of 100 questions and more.
SIZES = np.linspace(100, 390, 57).astype(int)


def _subjects(rng: np.random.Generator, loss: float) -> dict[Scope, PairedDifference]:
    """Every seventh answer changes, and ``loss`` is lost of all, in each subject."""
    scopes = {}
    for number, questions in enumerate(SIZES):
        drawn = rng.choice([-1, 0, 1], questions, p=[0.07 + loss / 2, 0.86, 0.07 - loss / 2])
        scopes[Scope(f"subject {number}", False)] = compare(drawn < 0, drawn > 0, resamples=200)
    return scopes


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_of_57_subjects_none_fails_by_chance(loss: float) -> None:
    """With plain 95 % intervals every second arm that loses nothing would fail, and most that lose one point."""
    rng = np.random.default_rng(0)
    plain = widened = 0
    for _ in range(40):
        verdicts = task_verdicts(_subjects(rng, loss))
        plain += any(verdict.paired.high < -1 for verdict in verdicts)
        widened += any(verdict.failed for verdict in verdicts)
    assert plain >= 10
    assert widened <= 2


def test_the_clearest_loss_comes_first_and_one_task_keeps_its_interval() -> None:
    found = {
        Scope("large", False): compare(np.ones(1000), np.repeat([1, 0], [930, 70])),
        Scope("small", False): compare(np.ones(20), np.repeat([1, 0], [18, 2])),
        Scope("needle", True): compare(np.ones(1000), np.zeros(1000)),
    }
    large, small = task_verdicts(found)
    assert (large.task, small.task) == ("large", "small")
    assert large.failed and not small.failed
    assert large.low < large.paired.low and large.high > large.paired.high
    (alone,) = task_verdicts({Scope("large", False): large.paired})
    assert (alone.low, alone.high) == pytest.approx((large.paired.low, large.paired.high))


def test_the_widened_interval_is_bonferronis() -> None:
    """Of a difference with a normal error: 1.96 standard errors become 3.33 for 57 tasks."""
    paired = PairedDifference(1000, 70.0, 65.0, -5.0, -5.0 - 1.96, -5.0 + 1.96, 0, 0, 1.0)
    assert paired.among(57) == pytest.approx((-5 - 3.327, -5 + 3.327), abs=0.01)


@pytest.mark.parametrize(("questions", "tasks"), [(100, 57), (40, 2), (1000, 57)])
def test_the_least_visible_loss_is_seen_in_four_of_five_cases(questions: int, tasks: int) -> None:
    """Of 100 questions in one of 57 tasks, a loss of 12 points is named in two of five cases."""
    rng = np.random.default_rng(0)

    def seen(loss: float) -> float:
        found = 0
        for _ in range(200):
            lost = rng.random(questions) < loss / 100
            paired = compare(np.ones(questions), ~lost, resamples=300)
            found += paired.among(tasks)[1] < -1
        return found / 200

    visible = least_visible_loss(compare(np.ones(questions), np.ones(questions)), tasks)
    assert 0.7 <= seen(visible) <= 0.93
    if questions == 100:
        assert visible == pytest.approx(17, abs=1.5) and seen(12) < 0.5
