"""A sweep: one evaluation of all scores at all thresholds, with masks and random controls.

One recording of the task's prompts gives all scores; thresholds are quantiles of the pooled scores (arXiv 2504.03889).
The same command again resumes.

A model that finds half of the needles has little recall above chance, so that many questions are needed to show that an
arm keeps nine tenths of it. The whole model is asked first, before arms run that could never be shown to keep it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Any

import numpy as np

from headscan.ablation.rules import HeadRule
from headscan.catalog import RECALL_FAMILIES, SCORES, MassWidths, head_count, statistics_for
from headscan.engine.arms import BASELINE, Arm, criterion_masks, random_masks, random_rules, rules_by_score
from headscan.engine.replacements import ZERO_REPLACEMENT, ArmReplacement, collect_replacement
from headscan.errors import InterventionError
from headscan.runs.head_orders import find_run
from headscan.runs.model_identity import ModelFacts
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import IN_ALL, TaskConfig
from headscan.steps.checks import check_generates, check_next_token_head
from headscan.steps.question_step import QuestionStep
from headscan.steps.run_corpus import CorpusMeasurement, run_shards
from headscan.steps.run_evaluation import EVALUATE, Purpose, run_evaluation
from headscan.steps.run_scan import MeasureShard
from headscan.steps.sweep import Sweep
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT, RECALL_SPLITS, identical_questions
from headscan.text_tables import counted, html_text, percent
from headscan.texts import CorpusReport, TokenSequence, shards
from headscan.texts.sequences import hash_ids
from headscan.texts.tasks import Questions
from headscan.verdicts.confirmation import SweepChoice, choices_text, judge_sweep, record_confirmation
from headscan.verdicts.judge import Verdict, judge
from headscan.verdicts.scope_verdicts import least_questions, recall_needed, solves


def size_recall(config: Sweep, run: Run, *, judging_share: float, comparisons: int = 1) -> Sweep:
    """Ask the whole model, and return the settings with as many recall questions as its recall needs. The number stays
    if the settings state one; a line then warns if no arm could be shown to keep recall. The share ``judging_share`` of
    the recall texts, 0 to 1, judges ``comparisons`` arms.
    """
    recall = config.recall
    if recall is None:
        return config
    whole_model = whole_model_recall(config, run)
    if not whole_model:  # the questions are omitted, which the sweep reports
        return config
    fixed = recall.questions is not None or recall.in_all is not None
    sizes = {}
    for family in RECALL_FAMILIES:
        right, asked = whole_model[family]
        sizes[family], line = _size(family, right, asked, judging_share, comparisons, fixed=fixed)
        run.say(line)
    if fixed or max(sizes.values()) <= IN_ALL:
        return config
    return replace(config, recall=replace(recall, in_all=sizes))


def whole_model_recall(config: QuestionStep[Any], run: Run) -> dict[str, tuple[float, int]]:
    """Ask the whole model the recall questions; return accuracy in percent and number of questions by family. The
    result is empty if the questions fit neither the context nor the tokenizer.
    """
    tasks = TaskConfig(bos=config.tasks.bos)
    questions = Questions(tasks, config.recall, run.identity, recall_only=True)
    if not questions.requests:
        return {}
    run_id = run_evaluation(
        config, run, [BASELINE], questions=questions, purpose=Purpose(kind="recall", judges_arms=False)
    )
    rows = run.store.query(
        "SELECT split_part(task, '@', 1) AS family, 100 * avg(correct) AS right_share, count(*) AS asked"
        " FROM answers JOIN arms USING (arm_id) WHERE run_id = ? GROUP BY 1",
        [run_id],
    ).to_pylist()
    return {row["family"]: (row["right_share"], row["asked"]) for row in rows}


def _size(
    name: str, right: float, asked: int, judging_share: float, comparisons: int, *, fixed: bool
) -> tuple[int, str]:
    """Return the number of questions of a family, and a line about it."""
    family = RECALL_FAMILIES[name]
    does = f"the whole model {family.does.format(right)}"
    if not solves(name, right, asked):
        return IN_ALL, f"{does}: too few to judge {name} recall, so no arm is judged by it"
    numbers = (recall_needed(name, right, comparisons), least_questions(right, family.chance, comparisons))
    needed, least = (QUESTIONS_PER_TEXT * ceil(number / judging_share / QUESTIONS_PER_TEXT) for number in numbers)
    if not fixed:
        if needed <= IN_ALL:
            return IN_ALL, f"{does}: {IN_ALL} {name} questions can show that an arm keeps that"
        return needed, f"{does}: {needed:,} {name} questions instead of {IN_ALL}, to show that an arm keeps that"
    if asked < least:
        return asked, (
            f"{does}: {asked:,} {name} questions cannot show that an arm keeps that, not even with identical answers"
            f" (limit about {least:,}). Ask about {needed:,} over all lengths, or leave their number to the sweep"
        )
    return asked, f"{does}: {asked:,} {name} questions can show that an arm keeps that"


#: Prompts per shard, the unit of storing and resuming.
_SHARD = 64


def record_prompts(config: Sweep, run: Run, questions: Questions) -> str:
    """Measure every prompt of the benchmark with no head ablated; return the run's id. The scores have one entry for
    each distinct input: the choices of a question are often one input.
    """
    statistics = tuple(sorted(statistics_for(SCORES)))
    widths = MassWidths()
    prompts = questions.prompts()
    names = ", ".join(config.tasks.names)
    hashes = "".join(hash_ids(np.asarray(prompt, dtype=np.int32)) for prompt in prompts)
    prompts_hash, report = hashlib.sha256(hashes.encode()).hexdigest(), CorpusReport()
    task = MeasureShard(statistics, widths, run.batch_tokens, False, run.identity.rope_lengths)
    settings = {"statistics": statistics}
    done = run_shards(
        run,
        CorpusMeasurement("recording", task, 1, settings | {"widths": asdict(widths)}, settings | asdict(widths)),
        lambda size: shards(_sequences(prompts, names, report), shard_size=size),
        report,
        decides={"prompts": prompts_hash},
        stores={"tasks": config.tasks.names},
        longest=max(map(len, prompts), default=1),
        shard_size=_SHARD,
        corpus=f"prompts of {names}",
        corpus_hash=prompts_hash,
        bos_policy=config.tasks.bos,
    )
    if done.already_done:
        run.say(f"run {done.run_id}: the prompts of {names} were recorded before")
    return done.run_id


def _sequences(prompts: Iterable[tuple[int, ...]], source: str, report: CorpusReport) -> Iterator[TokenSequence]:
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt, dtype=np.int32)
        report.documents += 1
        report.sequences += 1
        report.tokens += len(ids)
        yield TokenSequence(index, index, source, ids, False, hash_ids(ids)[:16])


@dataclass(frozen=True)
class SweepResult:
    """The verdicts of a sweep.

    Attributes:
        scan_run: Run with the recorded scores of the prompts.
        verdict: All arms, judged on all questions, without a correction for the choice of the best one.
        choices: The best rule and the best mask, if there are such arms, judged on the questions that did not select
            them; with ``confirm=False`` all questions select and judge.
    """

    scan_run: str
    verdict: Verdict
    choices: tuple[SweepChoice, ...]

    def __str__(self) -> str:
        return choices_text(self.choices)

    def _repr_html_(self) -> str:
        return html_text(str(self))


def run_sweep(config: Sweep, run: Run) -> SweepResult:
    """Evaluate the arms of a sweep; judge all on all questions, and the best as ``confirm`` of the settings states."""
    questions = Questions(config.tasks, config.recall, run.identity, config.text)
    half, least = questions.tasks.questions // 2, identical_questions(bool(config.scores) + bool(config.mask_criteria))
    if config.confirm and 0 < half < least:
        run.say(
            f"each half of the questions has about {half} (limit {least}), too few to confirm any arm as"
            " safe. Raise `limit`, or use `confirm=False` to judge on all questions"
        )
    check_next_token_head(run)
    check_generates(run.pool, questions.requests)
    for score in config.scores:
        HeadRule(score, 0.0)  # raises if rules cannot measure it, before the prompts are recorded
    _check_masks(config, run.facts)
    others = {
        name: find_run(run.store, run.identity, name, None) for name in config.mask_criteria if name not in SCORES
    }
    kinds = bool(config.scores) + bool(config.mask_criteria) if config.confirm else 1
    judging_share = 1 - 1 / RECALL_SPLITS if config.confirm else 1.0
    evaluation = size_recall(config, run, judging_share=judging_share, comparisons=kinds)
    questions.ask_recall(evaluation.recall)
    scan_run = record_prompts(evaluation, run, questions)
    replacement = collect_replacement(config.replacement, run, questions.longest_input())
    arms = sweep_arms(config, run.store, scan_run, run.facts, replacement, others)
    rules = sum(arm.kind is ArmKind.RULE for arm in arms)
    masks = sum(arm.kind is ArmKind.MASK for arm in arms)
    counts = {"rule": rules, "mask": masks, "random control": len(arms) - rules - masks - 1}
    parts = [counted(count, name) for name, count in counts.items()]
    run.say(f"{len(arms)} arms: the baseline, {', '.join(parts)}")
    # Each replacement is a run of its own: whether heads are inactive and whether they are constant is chosen apart.
    purpose = EVALUATE
    if replacement.texts_hash:
        purpose = Purpose(settings={"replace": config.replacement.kind, **dict(replacement.details)})
    evaluate_run = run_evaluation(evaluation, run, arms, questions=questions, purpose=purpose)
    if config.confirm:
        record_confirmation(run.store, evaluate_run)
    verdict = judge(run.store, evaluate_run)
    with at_work("verdicts on the choices"):
        return SweepResult(scan_run, verdict, judge_sweep(run.store, verdict, confirm=config.confirm))


def _check_masks(config: Sweep, facts: ModelFacts) -> None:
    """Raise InterventionError if a mask would ablate every head."""
    total = facts.grid.total_heads
    largest = max(config.distinct_shares)
    if config.mask_criteria and head_count(largest, total) >= total:
        raise InterventionError(
            f"a mask of {percent(largest)} ablates all {total} heads of the model (limit {total - 1}). Use smaller "
            "`shares`, or no `mask_criteria`"
        )


def sweep_arms(
    config: Sweep,
    store: Store,
    scan_run: str,
    facts: ModelFacts,
    replacement: ArmReplacement = ZERO_REPLACEMENT,
    others: Mapping[str, str] = MappingProxyType({}),
) -> list[Arm]:
    """Return the baseline, then all other arms share by share: rules, masks and random controls of a share are
    together, so that all curves grow together. ``others`` are the runs of masks that are no scores of the scan. The
    arms are marked, because later evaluations may add others to the run.
    """
    rules = [rules_by_score(store, scan_run, score, config.distinct_shares, replacement) for score in config.scores]
    masks = [
        criterion_masks(store, others.get(name, scan_run), name, config.distinct_shares, config.mask_order, replacement)
        for name in config.mask_criteria
    ]
    arms = [BASELINE]
    for number, share in enumerate(config.distinct_shares):
        arms += [of_score[number] for of_score in rules]
        if rules:
            arms += random_rules(share, config.controls, replacement)
        of_share = [of_score[number] for of_score in masks]
        arms += of_share
        if of_share:
            arms += random_masks(facts.grid, share, len(of_share[0].fixed_heads or ()), config.controls, replacement)
    return [arm if arm == BASELINE else replace(arm, measured=(*arm.measured, ("swept", True))) for arm in arms]
