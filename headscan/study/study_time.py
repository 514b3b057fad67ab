"""The plan of a study's hours: number of texts, shares, searches, and questions of each kind.

A forward pass is timed, and `question_costs` counts the tokens of the questions. Everything else follows from the
number of times that each step reads its texts. This module needs torch and transformers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any

import torch

from headscan.catalog import CRITERIA, RECALL_FAMILIES
from headscan.models.loaded_model import LoadedModel
from headscan.runs.progress import time_text
from headscan.steps.prune.model_costs import wait_for
from headscan.store.verdict_limits import identical_questions
from headscan.study.study_step import (
    FEWEST_JUDGED_TEXTS,
    FEWEST_STUDY_TEXTS,
    MOST_STUDY_TEXTS,
    SHARE_SETTINGS,
    Study,
    StudyError,
)
from headscan.text_tables import percent
from headscan.verdicts.looks import Look, planned_looks
from headscan.verdicts.paired import enough_questions, shown_change

#: Share of the time that the steps before the questions may take.
_STEPS = 0.6
#: What the time may allow, most first: texts, and the shares of each kind that are tried. With little time the small
#: shares are tried: a small model may lose recall with the first twentieth of its heads.
_ALL_SHARES = {
    "shares": (0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
    "window_shares": (0.1, 0.25, 0.5, 0.75),
    "prune_shares": (0.05, 0.1, 0.2, 0.3),
}
_SOME_SHARES = {"shares": (0.02, 0.05, 0.1), "window_shares": (0.1, 0.25), "prune_shares": (0.05, 0.1)}
_LEAST_SHARES = {"shares": (0.02, 0.05), "window_shares": (0.1,), "prune_shares": (0.05,)}
_EFFORTS = (
    (MOST_STUDY_TEXTS, _ALL_SHARES),
    (48, _ALL_SHARES),
    (32, _ALL_SHARES),
    (32, _SOME_SHARES),
    (24, _SOME_SHARES),
    (16, _SOME_SHARES),
    (16, _LEAST_SHARES),
    (FEWEST_STUDY_TEXTS, _LEAST_SHARES),
)
#: Fewest recall questions of each kind that judge.
_FEWEST_RECALL = 40
#: Fewest benchmark questions, and the largest share of the questions' time that recall takes.
_FEWEST, _MOST_RECALL_TIME = 100, 0.5
#: What a harmless share of heads changes at most: the share of counted answers, and the standard deviation of the
#: change of the right choice's probability. Of seven arms of the demo and SmolLM2 that are not shown to lose, six had
#: up to 2.5 % and 0.07, and a pruned model 5.3 % and 0.16.
_CHANGED_ANSWERS, _CHANGED_PROBABILITY = 0.03, 0.16
#: Rounds of questions that the time is made for; each has one share of every kind.
_ROUNDS = 2
#: How often the search for a plan reads all prompts in a large model, as `plans.window_search.search_passes` says.
_SEARCHES = 37.25


@dataclass(frozen=True)
class TimedPass:
    """A forward pass over random tokens, to be timed."""

    sequences: int
    tokens: int
    name: str = "timed pass"


def time_pass(lm: LoadedModel, item: TimedPass) -> float:
    """Pool task: return the tokens per second of a forward pass; a first pass is not timed."""
    ids = torch.randint(0, lm.model.config.get_text_config().vocab_size, (item.sequences, item.tokens))
    ids, seconds = ids.to(lm.device), 0.0
    for _ in range(2):
        wait_for(lm.device)
        started = time.perf_counter()
        with torch.no_grad():
            lm.model(input_ids=ids)
        wait_for(lm.device)
        seconds = time.perf_counter() - started
    return item.sequences * item.tokens / seconds


def harmless_change(by_probability: bool) -> float:
    """Return what a harmless share of heads changes, as `enough_questions` takes it."""
    return _CHANGED_PROBABILITY**2 if by_probability else _CHANGED_ANSWERS


def enough_for(config: Study, by_probability: bool) -> tuple[int, int]:
    """Return `QuestionCosts.enough`. Of the error of later hours half is left, as much as for twice as many kinds."""
    change, kinds = harmless_change(by_probability), config.kind_count
    first, later = (enough_questions(change, times * kinds, config.max_points) for times in (1, 2))
    return first, later


@dataclass(frozen=True)
class QuestionCosts:
    """Tokens of the questions, and the numbers that are enough.

    Attributes:
        tokens, recall_tokens: Tokens of a benchmark question, and of one question of each recall task together.
        by_probability: True if the probability of the right choice judges every question, not the count.
        enough: Benchmark questions with which a share with a `harmless_change` is shown to be safe; the second number
            is for questions that later hours ask, by which half of the error is left.
        available: Number of benchmark questions that the tasks have.
        enough_recall: Recall questions of each kind with which such a share is shown to keep recall, and the same for
            later hours; 0 if the model recalls too little to judge.
        recalls: What the whole model recalls, in words.
        repair_texts: Fewest texts that repair a pruned model: the widest projection that is solved has as many columns
            as these have tokens, with a quarter to spare for shorter texts.
    """

    tokens: float
    recall_tokens: float
    by_probability: bool
    enough: tuple[int, int]
    available: int
    enough_recall: tuple[int, int]
    recalls: str
    repair_texts: int = 0


def measures_recall(config: Study) -> bool:
    """Return True if a criterion needs the importance on recall prompts."""
    return any(CRITERIA[name].on_recall for name in config.ranking)


@dataclass(frozen=True)
class PassCosts:
    """Times of what a study repeats, as multiples of that of a plain forward pass over as many tokens.

    Attributes:
        scan: The statistics of a text; they cost about half of a pass.
        importance: The importance of all heads on a text; a backward pass costs two forward passes.
        derivatives: Gradients of every KV head's window on a text; 6 fits a run on SmolLM2 (5 minutes estimated, 6
            taken).
        repair: The repair of a model on a text, which runs through both models, and the solving; 3.5 fits a run on
            SmolLM2.
        damage: What a choice by damage takes in addition to a criterion, for each share.
    """

    scan: float = 1.5
    importance: float = 3.0
    derivatives: float = 6.0
    repair: float = 3.5
    damage: float = 24.0


def decided(config: Study, speed: float, costs: QuestionCosts, say: Callable[[str], None]) -> Study:
    """Return the settings with what the time decides at ``speed`` tokens per second; print how long each step takes,
    and what the questions can show.
    """
    asked, config = config, _decided(config, speed, costs)
    steps = study_seconds(config, costs, speed)
    say(
        f"a forward pass reads {speed:,.0f} tokens per second; about {time_text(sum(steps.values()))} in all"
        f" (limit {config.hours:g} h)"
    )
    width = max(map(len, steps))
    for name, each in steps.items():
        say(f"  {name:<{width}}  {time_text(each)}")
    say(f"{config.sequences} texts measure, and {config.judged_texts} texts and the questions judge")
    hours = (ceil(config.hours * 12.5 * 1.2**step) / 10 for step in range(50))
    enough = (each for each in hours if _is_enough(_decided(replace(asked, hours=each), speed, costs), costs))
    say(what_can_be_shown(config, costs, next(enough, None)))
    if costs.recalls and not costs.enough_recall[0]:
        say(f"the whole model hardly solves the recall tasks ({costs.recalls}): what is safe may still cost recall")
    return config


def _decided(config: Study, speed: float, costs: QuestionCosts) -> Study:
    """Return `decided` without a word."""
    if not costs.recall_tokens:
        config = replace(config, recall_questions=0)
    asked, seconds, passes = config, 3600 * config.hours, PassCosts()
    for texts_read, tried in _EFFORTS:
        shares: dict[str, Any] = {name: each for name, each in tried.items() if getattr(asked, name) is None}
        config = replace(
            asked,
            **shares,
            sequences=asked.sequences or texts_read,
            judged_texts=asked.judged_texts or max(texts_read, FEWEST_JUDGED_TEXTS),
        )
        # Without ablated heads there is no criterion, so fewer texts and shares make room for damage.
        only_damage = config.prune_by == "damage" or not config.shares
        damage = _damage_seconds(config, costs, speed, passes)
        spare = _STEPS * seconds - sum(_reading_seconds(config, costs, speed, passes).values()) - damage * only_damage
        if spare >= 0:
            break
    prune_by = config.prune_by or ("damage" if only_damage or damage < spare else "criterion")
    if prune_by == "damage" and not only_damage:
        spare -= damage
    search = config.search
    if search is None:
        search = bool(config.window_shares) and _search_seconds(config, speed) < spare
    config = replace(config, prune_by=prune_by, search=search)
    before = sum(_before_questions(config, costs, speed, passes).values())
    arms = 1 + _ROUNDS * config.kind_count
    tokens = max(0.0, seconds - before) * speed / arms
    recall = config.recall_questions
    if recall is None:
        afford = int(_MOST_RECALL_TIME * tokens / costs.recall_tokens)
        recall = 4 * (max(_FEWEST_RECALL, min(costs.enough_recall[0], afford)) // 4)
    spare = tokens - recall * costs.recall_tokens
    return _with_questions(replace(config, recall_questions=recall), costs, int(spare / costs.tokens))


def looks_of(config: Study) -> tuple[Look, ...]:
    """Return the planned looks of settings without open decisions; raise StudyError if they ask nothing."""
    assert config.questions is not None and config.recall_questions is not None
    assert config.max_questions is not None and config.max_recall_questions is not None
    first, last = (config.questions, config.recall_questions), (config.max_questions, config.max_recall_questions)
    if first == last == (0, 0):
        raise StudyError("`questions=0` without recall questions asks nothing. Set `questions` or `recall_questions`")
    return planned_looks(first, last, config.kind_count)


def _with_questions(config: Study, costs: QuestionCosts, afford: int) -> Study:
    """Return settings with the numbers of questions of the first hours, which allow ``afford``, and of later hours. The
    first hours ask none that could not show even identical answers to be safe, if recall is asked.
    """
    given, recall = config.questions, config.recall_questions
    assert recall is not None
    available = costs.available if config.max_questions is None else min(costs.available, config.max_questions)
    questions = min(available, max(_FEWEST, min(costs.enough[0], afford))) if given is None else given
    most = config.max_questions
    if most is None:
        later = given is None and questions < costs.enough[0]
        most = max(questions, min(costs.available, costs.enough[1])) if later else questions
    most_recall = config.max_recall_questions
    if most_recall is None:
        most_recall = (
            max(recall, costs.enough_recall[1]) if most > questions and costs.enough_recall[0] > recall else recall
        )
    config = replace(config, questions=questions, max_questions=most, max_recall_questions=most_recall)
    if given is None and recall and identical_questions(_comparisons(config), config.max_points) > questions:
        config = replace(config, questions=0)
    return config


def _comparisons(config: Study) -> float:
    """Return the number of comparisons for which the intervals of the first hours' questions are widened."""
    return next((look.comparisons for look in looks_of(config) if look.questions == config.questions), 1.0)


def _is_enough(config: Study, costs: QuestionCosts) -> bool:
    """Return True if the questions show a harmless share to be safe."""
    questions, recall = config.questions or 0, config.recall_questions or 0
    return questions >= costs.enough[0] and recall >= costs.enough_recall[0]


def what_can_be_shown(config: Study, costs: QuestionCosts, hours: float | None = None) -> str:
    """Return in words what the questions can show, and the options with which they show a harmless share to be safe,
    among them ``hours``, if there are such.
    """
    questions, comparisons = config.questions or 0, _comparisons(config)
    recall = f" and {config.recall_questions} of each recall task" * bool(config.recall_questions)
    change = shown_change(questions, comparisons, config.max_points)
    if not questions:
        shown = f"0 questions{recall} judge: those that the hours allow could not show that anything is safe"
    elif change < 0:
        shown = f"{questions:,} questions{recall} judge, which cannot show that anything is safe"
    else:
        shown = (
            f"{questions:,} questions{recall} judge: in four of five cases they show that a share is safe which loses"
            f" nothing and changes {_change_words(change, costs)}"
        )
    if _is_enough(config, costs):
        return shown
    ways, harmless = [] if hours is None else [f"--hours {hours:g}"], harmless_change(costs.by_probability)
    points = (p for p in (2, 3, 5, 10) if p > config.max_points and shown_change(questions, comparisons, p) >= harmless)
    if (wider := next(points, None)) is not None:
        ways.append(f"--max-points {wider}")
    if config.kind_count > 1:
        option = next(name for name in SHARE_SETTINGS if getattr(config, name)).replace("_", "-")
        ways.append(f"fewer kinds of savings (such as --{option} none)")
    needed = (
        f"{shown}. A harmless share changes {_change_words(harmless, costs)}, which takes {costs.enough[0]:,} questions"
    )
    if costs.enough_recall[0]:
        needed += f" and {costs.enough_recall[0]:,} of each recall task (the whole model: {costs.recalls})"
    return f"{needed}: {', or '.join(ways)}" if ways else needed


def _change_words(change: float, costs: QuestionCosts) -> str:
    """Return a change, as `shown_change` returns it, in words."""
    if costs.by_probability:
        return f"the probability of the right choice by up to {sqrt(change):.2f} (standard deviation)"
    return f"up to {percent(change)} of the answers"


def study_seconds(
    config: Study, costs: QuestionCosts, speed: float, passes: PassCosts = PassCosts()
) -> dict[str, float]:
    """Return the approximate seconds of each step of a study without open decisions at ``speed`` tokens per second."""
    assert config.questions is not None and config.recall_questions is not None
    tokens = config.questions * costs.tokens + config.recall_questions * costs.recall_tokens
    questions = (1 + _ROUNDS * config.kind_count) * tokens / speed
    return _before_questions(config, costs, speed, passes) | {"7. questions": questions}


def _before_questions(config: Study, costs: QuestionCosts, speed: float, passes: PassCosts) -> dict[str, float]:
    """Return the seconds of each step before the questions, with searches by what the settings decide."""
    steps = _reading_seconds(config, costs, speed, passes)
    if config.search:
        steps["4. plans"] += _search_seconds(config, speed)
    if config.prune_by == "damage":
        steps["5. pruning"] += _damage_seconds(config, costs, speed, passes)
    return steps


def _search_seconds(config: Study, speed: float) -> float:
    """Return the seconds of a search for plans."""
    assert config.sequences is not None and config.max_tokens is not None
    prompts = config.sequences / 2 + config.recall_prompts
    return _SEARCHES * _number(config.window_shares) * prompts * config.max_tokens / speed


def _damage_seconds(config: Study, costs: QuestionCosts, speed: float, passes: PassCosts) -> float:
    """Return the seconds by which choices of removed heads by damage exceed those by a criterion."""
    assert config.max_tokens is not None
    return passes.damage * _number(config.prune_shares) * _repairing(config, costs) * config.max_tokens / speed


def _repairing(config: Study, costs: QuestionCosts) -> int:
    """Return the number of texts that choose removed heads and repair."""
    assert config.sequences is not None
    return max(config.sequences, costs.repair_texts)


def _number(shares: tuple[float, ...] | None) -> int:
    return len(shares or ())


def _reading_seconds(config: Study, costs: QuestionCosts, speed: float, passes: PassCosts) -> dict[str, float]:
    """Return the approximate seconds of each step before the questions, without searches, from the number of its passes
    over texts and prompts at ``speed`` tokens per second.
    """
    sequences, judged_texts = config.sequences, config.judged_texts
    assert config.max_tokens is not None and sequences is not None and judged_texts is not None
    per_text = config.max_tokens / speed
    masks, windows, pruned = (_number(getattr(config, name)) for name in SHARE_SETTINGS)
    prompts = sequences / 2 + config.recall_prompts
    # One criterion needs no comparison, and scores of the scan no importance.
    candidates = masks * len(config.ranking) if len(config.ranking) > 1 else 0
    by_importance = masks > 0 and any(CRITERIA[name].run != "scan" for name in config.ranking)
    measured = (sequences + len(RECALL_FAMILIES) * config.recall_prompts * measures_recall(config)) * by_importance
    repaired = 2 * _repairing(config, costs) + 4 * config.recall_prompts
    return {
        "1. scan": passes.scan * sequences * per_text,
        # 60 sequences of repeats and prompts with needles.
        "2. probe": 60 * 256 / speed,
        # Arms share the layers below their heads.
        "3. importance, criterion": (
            passes.importance * measured + candidates * (judged_texts / 2 + config.recall_prompts)
        )
        * per_text,
        # Each set of windows is measured, too.
        "4. plans": (passes.derivatives + windows) * prompts * per_text,
        # Twice the texts and prompts run through both models.
        "5. pruning": passes.repair * pruned * repaired * per_text,
        "6. loss": (1 + masks + windows + pruned) * judged_texts * per_text,
    }
