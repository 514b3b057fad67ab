"""The plan of a study's hours: number of texts, shares, searches, and questions of each kind.

A forward pass is timed, the questions are built and their tokens counted, and the whole model is asked recall
questions. Everything else follows from the number of times that each step reads its texts.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from headscan.analysis.verdicts.paired import enough_questions
from headscan.analysis.verdicts.scope_verdicts import recall_needed, solves
from headscan.catalog import CRITERIA, RECALL_FAMILIES
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.corpora import CorpusError
from headscan.pipelines.evaluate.continuation_task import CONTINUATION, make_questions, write_task
from headscan.pipelines.evaluate.run_sweep import whole_model_recall
from headscan.pipelines.evaluate.tasks import Questions, Tasks
from headscan.pipelines.pruning.model_costs import columns_to_solve, wait_for
from headscan.pipelines.pruning.prune_config import RepairChoice
from headscan.pipelines.runs.head_orders import run_kind
from headscan.pipelines.runs.progress import time_text
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.settings.evaluation_settings import EvaluateConfig, RecallError, RecallQuestions, TaskConfig
from headscan.pipelines.study.study_config import (
    FEWEST_JUDGED_TEXTS,
    FEWEST_STUDY_TEXTS,
    MOST_STUDY_TEXTS,
    SHARE_SETTINGS,
    StudyConfig,
    StudyError,
)
from headscan.pipelines.study.study_texts import StudyTexts

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
#: Number of questions of each task or kind whose tokens are counted.
_SAMPLE = 16
#: Recall questions of each kind that the whole model is asked, and the fewest that judge.
_ASKED_FIRST, _FEWEST_RECALL = 32, 40
#: Fewest benchmark questions, and the largest share of the questions' time that recall takes.
_FEWEST, _MOST_RECALL_TIME = 100, 0.5
#: Share of the answers that a harmless share of heads changes.
_CHANGED = 0.03
#: Rounds of questions that the time is made for; each has one share of every kind.
_ROUNDS = 2
#: Approximate number of sets of windows that a search for a plan measures.
_SETS = 130
#: Passes over the calibration texts by which a choice by damage exceeds one by a criterion, for each share.
_DAMAGE_PASSES = 24


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


@dataclass(frozen=True)
class QuestionCosts:
    """Tokens of the questions, and the numbers that are enough.

    Attributes:
        tokens, recall_tokens: Tokens of a benchmark question, and of one question of each recall task together.
        enough: Benchmark questions with which a share that changes 3 % of the answers is shown to be safe.
        available: Number of benchmark questions that the tasks have.
        enough_recall: Recall questions of each kind with which such a share is shown to keep recall; 0 if the model
            recalls too little to judge.
        recalls: What the whole model recalls, in words.
        repair_texts: Fewest texts that repair a pruned model: the widest projection that is solved has as many columns
            as these have tokens, with a quarter to spare for shorter texts.
    """

    tokens: float
    recall_tokens: float
    enough: int
    available: int
    enough_recall: int
    recalls: str
    repair_texts: int = 0


def question_costs(config: StudyConfig, run: Run, texts: StudyTexts) -> QuestionCosts:
    """Count the tokens of some questions, and ask the whole model recall questions that judge nothing."""
    assert config.max_tokens is not None
    enough = enough_questions(_CHANGED, config.kind_count)
    made = len(make_questions(texts.judged_files, enough))
    if config.tasks is None and not made:
        raise StudyError(
            "no question can be made of the texts that judge: each needs about 800 characters of one text. Give longer"
            " texts, or `tasks`"
        )
    with tempfile.TemporaryDirectory() as folder:
        tasks = config.tasks
        if tasks is None:
            write_task(Path(folder), texts.judged_files, _SAMPLE, name=CONTINUATION)
            tasks = TaskConfig((CONTINUATION,), include_path=folder)
        sample = Questions(replace(tasks, limit=min(_SAMPLE, tasks.limit or _SAMPLE)), None, run.identity)
        of_task = {name: min(count, tasks.limit or count) for name, count in sample.tasks.available.items()}
        sampled = sum(min(_SAMPLE, count) for count in of_task.values())
        tokens = sample.tokens_to_read() / max(1, sampled)
    available = sum(of_task.values()) if config.tasks else made
    if not available:
        raise StudyError("the tasks have no question with a right answer, so they cannot judge. Choose other `tasks`")
    asked = RecallQuestions(lengths=(config.max_tokens - 1,), questions=_ASKED_FIRST, seed=1)
    recall_tokens = _recall_tokens(config, asked, run)
    needed, words = [0], []
    if config.recall_questions is None and recall_tokens:
        asking = EvaluateConfig(config.model, TaskConfig(), asked, config.batch_tokens)
        for kind, (right, number) in whole_model_recall(asking, run).items():
            words.append(f"{kind} {right:.0f} %")
            if solves(kind, right, number):
                needed.append(recall_needed(kind, right, config.kind_count))
    repairing = 0 if config.prune_shares == () else repair_texts(run, config.max_tokens)
    return QuestionCosts(tokens, recall_tokens, enough, available, max(needed), ", ".join(words), repairing)


def repair_texts(run: Run, tokens: int) -> int:
    """Return `QuestionCosts.repair_texts` of texts of some length."""
    columns: int = run.pool.one(columns_to_solve, RepairChoice().targets)
    return ceil(1.25 * columns / tokens)


def _recall_tokens(config: StudyConfig, asked: RecallQuestions, run: Run) -> float:
    """Return the tokens of one question of each recall task; 0 if none is asked, or if none fits."""
    if config.recall_questions == 0:
        return 0.0
    try:
        return Questions(TaskConfig(), asked, run.identity, recall_only=True).tokens_to_read() / _ASKED_FIRST
    except (RecallError, CorpusError) as problem:
        if config.recall_questions is not None:
            raise StudyError(
                f"`recall_questions={config.recall_questions}` do not fit `max_tokens={config.max_tokens}` or the"
                f" tokenizer ({problem}). Raise `max_tokens`, or set `recall_questions` to 0"
            ) from problem
        run.say(f"no recall question is asked, so it stays unknown whether recall is kept ({problem})")
        return 0.0


def measures_recall(config: StudyConfig) -> bool:
    """Return True if a criterion needs the importance on recall prompts."""
    return any(CRITERIA[name].on_recall for name in config.ranking)


def limit_per_task(tasks: TaskConfig, questions: int) -> int:
    """Return the limit with which the tasks have about ``questions`` questions together, at least one each."""
    sizes = Tasks(tasks).available.values()
    limits = range(1, max(sizes, default=1) + 1)
    return max(1, bisect_right(limits, questions, key=lambda limit: sum(min(size, limit) for size in sizes)))


def decided(config: StudyConfig, speed: float, costs: QuestionCosts, say: Callable[[str], None]) -> StudyConfig:
    """Return the settings with what the time decides at ``speed`` tokens per second, and print how long each step
    takes.
    """
    if not costs.recall_tokens:
        config = replace(config, recall_questions=0)
    asked, length = config, config.max_tokens
    assert length is not None
    seconds, per_text = 3600 * config.hours, length / speed
    for texts_read, tried in _EFFORTS:
        shares: dict[str, Any] = {name: each for name, each in tried.items() if getattr(asked, name) is None}
        config = replace(asked, **shares)
        sequences, judged_texts = (
            config.sequences or texts_read,
            config.judged_texts or max(texts_read, FEWEST_JUDGED_TEXTS),
        )
        repairing = max(sequences, costs.repair_texts)
        steps = _step_seconds(config, sequences, repairing, judged_texts, speed)
        damage = _DAMAGE_PASSES * _number(config.prune_shares) * repairing * per_text
        # Without ablated heads there is no criterion, so fewer texts and shares make room for damage.
        only_damage = config.prune_by == "damage" or not config.shares
        if only_damage:
            steps["5. pruning"] += damage
        if sum(steps.values()) <= _STEPS * seconds:
            break
    spare = _STEPS * seconds - sum(steps.values())
    search = _SETS * _number(config.window_shares) * (sequences / 2 + config.recall_prompts) * per_text
    prune_by = config.prune_by or ("damage" if only_damage or damage < spare else "criterion")
    if prune_by == "damage" and not only_damage:
        steps["5. pruning"] += damage
        spare -= damage
    searches = config.search if config.search is not None else bool(config.window_shares) and search < spare
    if searches:
        steps["4. plans"] += search
    before = sum(steps.values())
    arms = 1 + _ROUNDS * config.kind_count
    tokens = max(0.0, seconds - before) * speed / arms
    recall = config.recall_questions
    if recall is None:
        afford = int(_MOST_RECALL_TIME * tokens / costs.recall_tokens)
        recall = 4 * (max(_FEWEST_RECALL, min(costs.enough_recall, afford)) // 4)
    questions = config.questions
    if questions is None:
        afford = int((tokens - recall * costs.recall_tokens) / costs.tokens)
        questions = min(costs.available, max(_FEWEST, min(costs.enough, afford)))
    steps["7. questions"] = arms * (questions * costs.tokens + recall * costs.recall_tokens) / speed
    say(
        f"a forward pass reads {speed:,.0f} tokens per second; about {time_text(sum(steps.values()))} in all"
        f" (limit {config.hours:g} h)"
    )
    width = max(map(len, steps))
    for name, each in steps.items():
        say(f"  {name:<{width}}  {time_text(each)}")
    needs = f"{costs.enough:,} questions"
    if costs.enough_recall:
        needs += f" and {costs.enough_recall:,} of each recall task (the whole model: {costs.recalls})"
    judging = min(questions, costs.available)
    tokens_enough = costs.enough * costs.tokens + costs.enough_recall * costs.recall_tokens
    say(
        f"{sequences} texts measure; {judged_texts} texts, {judging:,} questions and {recall} of each recall task"
        f" judge. To show that a harmless share, which changes {_CHANGED:.0%} of the answers, is safe takes about"
        f" {needs}, with which the study takes {time_text(before + arms * tokens_enough / speed)}"
    )
    if costs.recalls and not costs.enough_recall:
        say(f"the whole model hardly solves the recall tasks ({costs.recalls}): what is safe may still cost recall")
    return replace(
        config,
        sequences=sequences,
        judged_texts=judged_texts,
        questions=questions,
        recall_questions=recall,
        search=searches,
        prune_by=prune_by,
    )


def _number(shares: tuple[float, ...] | None) -> int:
    return len(shares or ())


def _step_seconds(
    config: StudyConfig, sequences: int, repairing: int, judged_texts: int, speed: float
) -> dict[str, float]:
    """Return the approximate seconds of each step before the questions, without searches, from the number of its passes
    over texts and prompts at ``speed`` tokens per second.
    """
    assert config.max_tokens is not None
    per_text = config.max_tokens / speed
    masks, windows, pruned = (_number(getattr(config, name)) for name in SHARE_SETTINGS)
    prompts = sequences / 2 + config.recall_prompts
    # One criterion needs no comparison, and scores of the scan no importance.
    candidates = masks * len(config.ranking) if len(config.ranking) > 1 else 0
    by_importance = masks > 0 and any(run_kind(name) != "scan" for name in config.ranking)
    measured = (sequences + len(RECALL_FAMILIES) * config.recall_prompts * measures_recall(config)) * by_importance
    return {
        # Statistics cost about half of a pass.
        "1. scan": 1.5 * sequences * per_text,
        # 60 sequences of repeats and prompts with needles.
        "2. probe": 60 * 256 / speed,
        # Importance has a backward pass, which costs two forward passes; arms share the layers below their heads.
        "3. importance, criterion": (3 * measured + candidates * (judged_texts / 2 + config.recall_prompts)) * per_text,
        # Gradients of every head, and each set of windows; 6 fits a run on SmolLM2 (5 minutes estimated, 6 taken).
        "4. plans": (6 + windows) * prompts * per_text,
        # Twice the texts and prompts run through both models, and solving takes time; 3.5 fits a run on SmolLM2.
        "5. pruning": 3.5 * pruned * (2 * repairing + 4 * config.recall_prompts) * per_text,
        "6. loss": (1 + masks + windows + pruned) * judged_texts * per_text,
    }
