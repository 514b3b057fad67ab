"""Number of recall questions of a sweep, from what the whole model recalls.

A model that finds half of the needles has little recall above chance, so that many questions are needed to show that an
arm keeps nine tenths of it. The whole model is asked first, before arms run that could never be shown to keep it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.paired import CHANCE
from headscan.analysis.verdicts.verdict_rows import least_questions, recall_needed, solves
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.run_evaluation import Purpose, evaluate
from headscan.pipelines.recall.recall_plan import COPYING, IN_ALL, NEEDLE
from headscan.pipelines.runs.run_records import Run
from headscan.pipelines.scoring.arms import BASELINE
from headscan.pipelines.settings.evaluation_settings import SHARING, EvaluateConfig, TaskConfig

#: What a model does with the questions of a kind.
_DOES = {NEEDLE: "finds {:.0f} % of the needles", COPYING: "copies {:.0f} % of the tokens"}


def size_recall(config: EvaluateConfig, run: Run, *, part: float, comparisons: int = 1) -> EvaluateConfig:
    """Ask the whole model, and return the settings with as many recall questions as its recall needs. The number stays
    if the plan states one; a line then warns if no arm could be shown to keep recall.

    Args:
        part: Share of the recall texts that judge, 0 to 1.
        comparisons: Number of arms that they judge.
    """
    plan = config.recall
    if plan is None:
        return config
    tasks = TaskConfig((), bos=config.tasks.bos)
    questions = Questions(tasks, plan, run.identity, recall_only=True)
    if not questions.requests:  # they are omitted, which the sweep reports
        return config
    run_id = evaluate(
        replace(config, tasks=tasks, text=None),
        run,
        [BASELINE],
        questions=questions,
        purpose=Purpose(kind="recall", judges_arms=False),
    )
    fixed = plan.questions is not None or plan.in_all is not None
    found, sizes = _recalled(run.store, run_id), {}
    for kind in (NEEDLE, COPYING):
        right, asked = found[kind]
        sizes[kind], line = _size(kind, right, asked, part, comparisons, fixed=fixed)
        run.say(line)
    if fixed or max(sizes.values()) <= IN_ALL:
        return config
    return replace(config, recall=replace(plan, in_all=(sizes[NEEDLE], sizes[COPYING])))


def _recalled(store: Store, run_id: str) -> dict[str, tuple[float, int]]:
    """Return accuracy in percent and number of questions of the whole model, by kind."""
    rows = store.query(
        "SELECT split_part(task, '@', 1) AS kind, 100 * avg(correct) AS right_share, count(*) AS asked"
        " FROM answers JOIN arms USING (arm_id) WHERE run_id = ? GROUP BY 1",
        [run_id],
    ).to_pylist()
    return {row["kind"]: (row["right_share"], row["asked"]) for row in rows}


def _size(kind: str, right: float, asked: int, part: float, comparisons: int, *, fixed: bool) -> tuple[int, str]:
    """Return the number of questions of a kind, and a line about it."""
    does = f"the whole model {_DOES[kind].format(right)}"
    if not solves(kind, right, asked):
        return IN_ALL, f"{does}: too few to judge {kind} recall, so no arm is judged by it"
    numbers = (recall_needed(kind, right, comparisons), least_questions(right, CHANCE[kind], comparisons))
    needed, least = (SHARING * ceil(number / part / SHARING) for number in numbers)
    if not fixed:
        if needed <= IN_ALL:
            return IN_ALL, f"{does}: {IN_ALL} {kind} questions can show that an arm keeps that"
        return needed, f"{does}: {needed:,} {kind} questions instead of {IN_ALL}, to show that an arm keeps that"
    if asked < least:
        return asked, (
            f"{does}: {asked:,} {kind} questions cannot show that an arm keeps that, not even with identical answers"
            f" (limit about {least:,}). Ask about {needed:,} over all lengths, or leave their number to the sweep"
        )
    return asked, f"{does}: {asked:,} {kind} questions can show that an arm keeps that"
