"""The costs of a study's questions: some are built, and the whole model answers recall questions."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import RecallError, RecallQuestions, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.prune.model_costs import columns_to_solve
from headscan.steps.prune.prune_step import RepairChoice
from headscan.steps.run_sweep import whole_model_recall
from headscan.study.study_step import Study, StudyError
from headscan.study.study_texts import StudyTexts
from headscan.study.study_time import QuestionCosts, enough_for
from headscan.texts import CorpusError
from headscan.texts.continuation_task import CONTINUATION, make_questions, write_task
from headscan.texts.tasks import Questions, Tasks
from headscan.verdicts.scope_verdicts import recall_needed, solves

#: Number of questions of each task or kind whose tokens are counted.
_SAMPLE = 16
#: Recall questions of each kind that the whole model is asked.
_ASKED_FIRST = 32


def question_costs(config: Study, run: Run, texts: StudyTexts) -> QuestionCosts:
    """Count the tokens of some questions, and ask the whole model recall questions that judge nothing."""
    assert config.max_tokens is not None
    kinds, tasks = config.kind_count, config.tasks
    most = max(enough_for(config, by_probability=True)[1], config.questions or 0, config.max_questions or 0)
    made = len(make_questions(texts.judged_files, most))
    if not config.tasks.names and not made:
        raise StudyError(
            "no question can be made of the texts that judge: each needs about 800 characters of one text. Give longer"
            " texts, or `tasks`"
        )
    with tempfile.TemporaryDirectory() as folder:
        if not tasks.names:
            write_task(Path(folder), texts.judged_files, _SAMPLE, name=CONTINUATION)
            tasks = TaskConfig((CONTINUATION,), include_path=folder)
        sample = Questions(replace(tasks, limit=min(_SAMPLE, tasks.limit or _SAMPLE)), None, run.identity)
        of_task = {name: min(count, tasks.limit or count) for name, count in sample.tasks.available.items()}
        sampled = sum(min(_SAMPLE, count) for count in of_task.values())
        tokens, by_probability = sample.tokens_to_read() / max(1, sampled), sample.tasks.by_probability
        if config.tasks.names:
            others = [file.read_text(encoding="utf-8") for file in texts.other_files]
            with at_work("text that tasks share"):
                shared = Tasks(config.tasks).overlap(others, "the texts that measure or choose")
            run.say(shared)
    available = sum(of_task.values()) if config.tasks.names else made
    if not available:
        raise StudyError("the tasks have no question with a right answer, so they cannot judge. Choose other `tasks`")
    asked = RecallQuestions(lengths=(config.max_tokens - 1,), questions=_ASKED_FIRST, seed=1)
    recall_tokens = _recall_tokens(config, asked, run)
    needed, words = [(0, 0)], []
    if config.recall_questions is None and recall_tokens:
        asking = Evaluate(config.model, recall=asked)
        for kind, (right, number) in whole_model_recall(asking, run).items():
            words.append(f"{kind} {right:.0f} %")
            if solves(kind, right, number):
                needed.append((recall_needed(kind, right, kinds), recall_needed(kind, right, 2 * kinds)))
    repairing = 0 if config.prune_shares == () else repair_texts(run, config.max_tokens)
    return QuestionCosts(
        tokens,
        recall_tokens,
        by_probability,
        enough_for(config, by_probability),
        available,
        max(needed),
        ", ".join(words),
        repairing,
    )


def repair_texts(run: Run, tokens: int) -> int:
    """Return `QuestionCosts.repair_texts` of texts of some length."""
    columns: int = run.pool.one(columns_to_solve, RepairChoice().targets)
    return ceil(1.25 * columns / tokens)


def _recall_tokens(config: Study, asked: RecallQuestions, run: Run) -> float:
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


def limits_per_task(tasks: TaskConfig, numbers: Sequence[int]) -> list[int]:
    """Return the limits with which the tasks have about these numbers of questions together, at least one each; no
    question is none of each.
    """
    sizes = [min(size, tasks.limit or size) for size in Tasks(tasks).available.values()]
    limits = range(1, max(sizes, default=1) + 1)
    return [
        max(1, bisect_right(limits, number, key=lambda limit: sum(min(size, limit) for size in sizes))) if number else 0
        for number in numbers
    ]
