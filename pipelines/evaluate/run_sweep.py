"""A sweep: every score at every threshold, masks and random controls beside them, in one evaluation.

One recording of the task's prompts gives all scores; the thresholds are quantiles of the pool of them (arXiv
2504.03889). The same command again resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_QUESTIONS
from headscan.analysis.verdicts.confirmation import record_confirmation
from headscan.catalog import SCORES
from headscan.cluster.tasks.pool import Pool
from headscan.errors import InterventionError
from headscan.measure.scores import find_score
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.recording import record_prompts
from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig, check_predicts, check_scored, evaluate
from headscan.pipelines.runs.identity import ModelFacts, identify
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.scoring.arms import (
    BASELINE,
    Arm,
    MaskOrder,
    random_masks,
    random_rules,
    scored_masks,
    scored_rules,
)

#: The paper's shares of heads.
QUANTILES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


@dataclass(frozen=True)
class SweepConfig:
    """What is swept.

    Attributes:
        evaluation: What is asked of every arm.
        scores: For each of them a rule at every quantile.
        quantiles: Nominal shares of heads to ablate. At 0 nothing is beyond the threshold: that is the baseline.
        masks: Scores for which there is also a static mask at every share.
        mask_order: How masks order heads.
        seeds: Random controls at every share, of rules and of masks.
        confirm: Whether the best arm will be judged on the questions that did not select it. The arms and
            their answers are the same; if a half has too few questions, the sweep reports that before it starts.

    Raises:
        UnknownNameError: The catalogue lacks a score.
        InterventionError: A quantile or a number of seeds out of range, or nothing to sweep.
    """

    evaluation: EvaluateConfig
    scores: tuple[str, ...] = tuple(SCORES)
    quantiles: tuple[float, ...] = QUANTILES
    masks: tuple[str, ...] = ("output_norm_ln",)
    mask_order: MaskOrder = "mean"
    seeds: int = 3
    confirm: bool = True

    def __post_init__(self) -> None:
        for score in (*self.scores, *self.masks):
            find_score(score)
        for quantile in self.quantiles:
            if not 0 <= quantile < 1:
                raise InterventionError(
                    f"quantile {quantile:g} is out of range: from 0 to below 1, where every head would be ablated; "
                    "give for example 0.1 for 10 %"
                )
        if not any(self.quantiles) or not (self.scores or self.masks):
            raise InterventionError("nothing to sweep: give a score and a quantile above 0")
        if self.seeds < 0:
            raise InterventionError(f"--seeds {self.seeds}: give 0 or more random controls")

    @property
    def shares(self) -> tuple[float, ...]:
        """The quantiles at which something is ablated, each once, ascending."""
        return tuple(sorted({quantile for quantile in self.quantiles if quantile}))


@dataclass(frozen=True)
class SweepRuns:
    """The runs of a sweep in the store: the recording of its prompts, and the evaluation of its arms."""

    scan_run: str
    evaluate_run: str


def sweep(
    config: SweepConfig,
    store: Store,
    pool: Pool,
    *,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> SweepRuns:
    """Record, choose the arms, and run them.

    Args:
        resume_anyway: Add to a run even if the software or the device changed; both are recorded.

    Raises:
        ResumeError: A run needs more rows, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: What a user can mend; what was answered until then stays.
    """
    identity = identify(config.evaluation.model)
    questions = Questions(config.evaluation.tasks, config.evaluation.recall, identity)
    half = questions.benchmark_size // 2
    if config.confirm and 0 < half < LEAST_QUESTIONS:
        say(
            f"each half of the questions has about {half}, too few to call anything removable (limit"
            f" {LEAST_QUESTIONS}); raise --limit, or judge on all questions with --no-confirm"
        )
    context = RunContext(identity, pool)
    check_predicts(context)
    if pool.staged:
        check_scored(questions.requests)
    _check_masks(config, context.facts)
    scan_run = record_prompts(config.evaluation, context, questions, store, pool, resume_anyway=resume_anyway, say=say)
    arms = sweep_arms(config, store, scan_run, context.facts)
    rules = sum(arm.kind is ArmKind.RULE for arm in arms)
    masks = sum(arm.kind is ArmKind.MASK for arm in arms)
    say(f"{len(arms)} arms: the baseline, {rules} rules, {masks} masks, {len(arms) - rules - masks - 1} random ones")
    evaluate_run = evaluate(
        config.evaluation, store, pool, arms, questions=questions, context=context, resume_anyway=resume_anyway, say=say
    )
    if config.confirm:
        record_confirmation(store, evaluate_run)
    return SweepRuns(scan_run, evaluate_run)


def _check_masks(config: SweepConfig, facts: ModelFacts) -> None:
    """Raise before anything is recorded if a mask would ablate every head."""
    total = len(list(facts.grid.heads()))
    largest = max(config.shares)
    if config.masks and floor(largest * total + 0.5) >= total:
        raise InterventionError(
            f"a mask of {largest:.0%} ablates all {total} heads of the model: give smaller quantiles, or --masks none"
        )


def sweep_arms(config: SweepConfig, store: Store, scan_run: str, facts: ModelFacts) -> list[Arm]:
    """The baseline, and then share by share, so that all curves grow together: rules, masks, random ones."""
    rules = [scored_rules(store, scan_run, score, config.shares) for score in config.scores]
    masks = [scored_masks(store, scan_run, score, config.shares, config.mask_order) for score in config.masks]
    arms = [BASELINE]
    for number, share in enumerate(config.shares):
        arms += [of_score[number] for of_score in rules]
        if rules:
            arms += random_rules(share, config.seeds)
        of_share = [of_score[number] for of_score in masks]
        arms += of_share
        if of_share:
            arms += random_masks(facts.grid, share, len(of_share[0].fixed_heads or ()), config.seeds)
    return arms
