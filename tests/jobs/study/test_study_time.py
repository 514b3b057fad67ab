"""What a study decides from its hours, and what it says about them before it begins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.catalog import RECALL_FAMILIES
from headscan.cluster.pool import InProcessPool
from headscan.plans.window_search import search_passes
from headscan.runs.progress import time_text
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.store.store import Store
from headscan.study import study_time
from headscan.study.question_costs import limits_per_task, question_costs
from headscan.study.study_step import StudyError
from headscan.study.study_texts import split_texts
from headscan.study.study_time import PassCosts, QuestionCosts, decided, harmless_change, study_seconds
from headscan.texts import CorpusSpec
from headscan.texts.continuation_task import write_task
from tests.jobs.conftest import THREADS
from tests.jobs.study.test_study import SPEC, open_study, tiny

COSTS = QuestionCosts(
    280.0, 300.0, False, enough=(3_000, 3_500), available=2_500, enough_recall=(500, 600), recalls="copying 60 %"
)


def test_the_time_decides_texts_and_shares(tmp_path: Path) -> None:
    """Open settings become smaller with the hours; given ones stay."""
    settings = open_study(tmp_path, hours=1, window_shares=(0.5,))
    found = [decided(settings, speed, COSTS, lambda line: None) for speed in (100_000.0, 1_000.0, 50.0)]
    assert [each.sequences for each in found] == sorted((each.sequences for each in found), reverse=True)
    assert found[0].sequences == 64 and found[-1].sequences == 8
    assert len(found[0].shares or ()) == 6
    assert len(found[-1].shares or ()) == 2 and {each.window_shares for each in found} == {(0.5,)}
    assert (found[0].questions or 0) > (found[-1].questions or 0)


def test_each_step_is_listed_with_its_time(tmp_path: Path) -> None:
    lines: list[str] = []
    decided(open_study(tmp_path), 1_000.0, COSTS, lines.append)
    steps = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert steps == [
        "1. scan",
        "2. probe",
        "3. importance, criterion",
        "4. plans",
        "5. pruning",
        "6. loss",
        "7. questions",
    ]


def test_the_time_of_a_step_follows_from_the_costs_of_its_passes(tmp_path: Path) -> None:
    """A text of 256 tokens takes 0.256 s at this speed; the two searches are decided, so they count."""
    settings = open_study(tmp_path, hours=20)
    lines: list[str] = []
    config = decided(settings, 1_000.0, COSTS, lines.append)
    assert (config.sequences, config.search, config.prune_by) == (64, True, "damage")
    own = study_seconds(config, COSTS, 1_000.0)
    assert [f"  {name}" in line for name, line in zip(own, lines[1:], strict=False)] == [True] * 7
    assert f"about {time_text(sum(own.values()))} in all" in lines[0]
    assert own["7. questions"] == pytest.approx(
        7 * ((config.questions or 0) * 280 + (config.recall_questions or 0) * 300) / 1_000
    )
    texts, prompts, kinds, repairs = 64, 16, len(RECALL_FAMILIES), 4
    of_cost = {
        "scan": ("1. scan", texts),
        "importance": ("3. importance, criterion", texts + kinds * prompts),
        "derivatives": ("4. plans", texts / 2 + prompts),
        "repair": ("5. pruning", repairs * (2 * texts + 4 * prompts)),
        "damage": ("5. pruning", repairs * texts),
    }
    for cost, (step, passes) in of_cost.items():
        more = replace(PassCosts(), **{cost: getattr(PassCosts(), cost) + 1})
        changed = study_seconds(config, COSTS, 1_000.0, more)
        assert {name for name in own if changed[name] != own[name]} == {step}
        assert changed[step] - own[step] == pytest.approx(0.256 * passes)


def test_a_search_takes_the_passes_of_the_largest_models() -> None:
    assert study_time._SEARCHES == sum(search_passes(1_000)) >= sum(search_passes(24))


def test_importance_takes_time_only_if_a_criterion_needs_it(tmp_path: Path) -> None:
    def third_step(**changed: Any) -> str:
        lines: list[str] = []
        settings = open_study(tmp_path, **changed)
        decided(settings, 1_000.0, COSTS, lines.append)
        return next(line.split("  ")[-1] for line in lines if "3. importance" in line)

    assert third_step(criteria=("output_norm_ln",)) == third_step(shares=()) == time_text(0.0)
    assert third_step(criteria=("importance",)) != time_text(0.0)


def test_without_ablated_heads_pruning_is_by_damage_and_its_time_counts(tmp_path: Path) -> None:
    """No criterion is chosen, however little time there is."""

    def fifth_step(**changed: Any) -> tuple[str | None, str]:
        lines: list[str] = []
        settings = open_study(tmp_path, hours=0.1, prune_shares=(0.05,), **changed)
        found = decided(settings, 300.0, COSTS, lines.append)
        assert found.sequences == 8
        return found.prune_by, next(line.split("  ")[-1] for line in lines if "5. pruning" in line)

    by_criterion, short = fifth_step()
    alone, long = fifth_step(shares=())
    assert (by_criterion, alone) == ("criterion", "damage")
    assert long == fifth_step(prune_by="damage")[1] != short


def test_questions_are_as_many_as_they_must_be_or_as_the_time_allows(tmp_path: Path) -> None:
    settings = open_study(tmp_path, hours=1)
    lines: list[str] = []
    rich = decided(settings, 100_000.0, COSTS, lines.append)
    assert (rich.questions, rich.recall_questions) == (COSTS.available, 500)
    assert (rich.max_questions, rich.max_recall_questions) == (COSTS.available, 500)
    assert "takes 3,000 questions and 500 of each recall task (the whole model: copying 60 %)" in lines[-1]
    enough = decided(settings, 100_000.0, replace(COSTS, available=9_000), lines.append)
    assert enough.questions == enough.max_questions == 3_000 and "harmless" not in lines[-1]
    # An hour at this speed reads less than the questions need: recall has at most half of their time.
    costs = replace(COSTS, enough_recall=(1_500, 1_800))
    poor = decided(settings, 2_500.0, costs, lines.append)
    assert 600 < (poor.questions or 0) < 2_500 and 40 < (poor.recall_questions or 0) < 1_500
    assert (poor.recall_questions or 0) * 300 <= 1.01 * (poor.questions or 0) * 280
    # More hours may ask as many as are enough with half of the error, where the tasks have them.
    assert (poor.max_questions, poor.max_recall_questions) == (2_500, 1_800)
    given = decided(replace(settings, questions=700), 2_500.0, costs, lines.append)
    assert given.questions == given.max_questions == 700
    later = decided(replace(settings, questions=700, max_questions=2_000), 2_500.0, costs, lines.append)
    assert (later.questions, later.max_questions) == (700, 2_000)
    unable = decided(settings, 100_000.0, replace(COSTS, enough_recall=(0, 0)), lines.append)
    assert unable.recall_questions == 40 and "recall task (" not in lines[-2]
    assert "hardly solves the recall tasks (copying 60 %): what is safe may still cost recall" in lines[-1]


def test_the_first_lines_say_what_can_be_shown_and_what_would(tmp_path: Path) -> None:
    lines: list[str] = []
    costs = replace(COSTS, available=9_000)
    poor = decided(open_study(tmp_path, hours=1), 600.0, costs, lines.append)
    # Fewer than show equal answers to be safe are not asked, and loss and recall alone judge.
    assert poor.questions == 0 and poor.max_questions == 3_500
    assert lines[-1].startswith("0 questions and ") and "could not show that anything is safe" in lines[-1]
    hours = float(re.search(r"--hours ([\d.]+)", lines[-1])[1])  # type: ignore[index]
    rich = decided(open_study(tmp_path, hours=hours), 600.0, costs, lines.append)
    assert rich.questions == 3_000 and "harmless" not in lines[-1]
    # Given numbers are asked, and the line says what they show.
    few = decided(open_study(tmp_path, hours=1, questions=300), 600.0, costs, lines.append)
    assert few.questions == 300 and "300 questions and " in lines[-1] and "cannot show" in lines[-1]
    assert "--max-points" in lines[-1] and "--shares none" in lines[-1]
    of_choices = replace(costs, by_probability=True, enough=(4_000, 4_500))
    decided(open_study(tmp_path, hours=hours, questions=1_500), 600.0, of_choices, lines.append)
    changes = re.findall(r"changes the probability of the right choice by up to ([\d.]+)", lines[-1])
    assert len(changes) == 2 and 0 < float(changes[0]) < float(changes[1])
    assert float(changes[1]) == pytest.approx(harmless_change(by_probability=True) ** 0.5)
    with pytest.raises(StudyError, match=r"asks nothing\. Set `questions` or"):
        decided(
            open_study(tmp_path, hours=1, questions=0, recall_questions=0, criteria=("entropy",)), 1e4, costs, print
        )


def test_costs_follow_from_the_questions_and_the_recall_of_the_whole_model(tmp_path: Path) -> None:
    """The demo model copies, so copying questions have a number that is enough; given numbers ask nothing."""
    texts = split_texts(CorpusSpec("python-stdlib-heldout"), tmp_path / "parts")
    config = tiny(tmp_path, recall_questions=None)
    lines: list[str] = []
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS), say=lines.append) as run_:
        costs = question_costs(config, run_, texts)
        given = question_costs(replace(config, recall_questions=8), run_, texts)
    # A context of 400 characters, and four passages of 80 with and without it.
    assert 400 / 5 < costs.tokens < (400 + 8 * 80) / 1.5
    # A needle and a copy; four of each share a text of 87 tokens.
    assert 87 / 2 <= costs.recall_tokens <= 2 * 87
    assert "copying" in costs.recalls and all(number % 4 == 0 for number in costs.enough_recall)
    assert (given.enough_recall, given.recalls) == ((0, 0), "")


def test_the_limit_of_each_task_gives_the_number_of_questions(tmp_path: Path) -> None:
    texts = split_texts(CorpusSpec("python-stdlib-heldout"), tmp_path / "parts")
    for name, number in (("few", 5), ("many", 30)):
        write_task(tmp_path / "tasks", texts.judged_files, number, name=name)
    tasks = TaskConfig(("few", "many"), include_path=str(tmp_path / "tasks"))
    assert limits_per_task(tasks, (0, 1, 2, 9, 10, 20, 34, 35, 99)) == [0, 1, 1, 4, 5, 15, 29, 30, 30]
