"""The arms that an evaluation is asked for: masks, rules, plans, other models and random controls."""

from __future__ import annotations

from dataclasses import replace

from headscan.engine.arms import BASELINE, criterion_masks, mask_arm, model_arm, random_controls, rules_by_score
from headscan.engine.replacements import collect_replacement
from headscan.ranking.head_roles import find_mask
from headscan.runs.head_orders import find_run
from headscan.runs.model_identity import identify
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import ChosenArms
from headscan.steps.evaluate import Evaluate
from headscan.steps.plan_arms import check_plan, plan_arms
from headscan.steps.run_evaluation import run_evaluation
from headscan.texts.tasks import Questions


def evaluate_chosen(config: Evaluate, run: Run, chosen: ChosenArms) -> str:
    """Evaluate the baseline and the chosen arms; return the run's id."""
    # What can be refused without a pass of the model comes before the replacement, whose collection takes passes.
    mask_heads = find_mask(run.store, chosen.mask, run.identity.columns()).heads if chosen.mask else ()
    head_sets = [heads for heads in (chosen.heads, mask_heads) if heads]
    ranking_run = (
        None if chosen.criterion is None else find_run(run.store, run.identity, chosen.criterion, chosen.run_id)
    )
    specs = [replace(config.model, source=source, revision=None) for source in dict.fromkeys(chosen.models)]
    models = [model_arm(spec, identify(spec), run.identity) for spec in specs]
    for plan in chosen.head_plans:
        check_plan(plan, run)
    plans = [arm for plan in chosen.head_plans for arm in plan_arms(plan, chosen.plan_modes, chosen.controls)]
    questions = Questions(config.tasks, config.recall, run.identity, config.text)
    replacement = collect_replacement(chosen.replacement, run, questions.longest_input())
    shares = [] if chosen.share is None else [chosen.share]
    arms = [BASELINE, *(mask_arm(heads, replacement) for heads in head_sets)]
    if chosen.criterion is not None and ranking_run is not None:
        arms += criterion_masks(run.store, ranking_run, chosen.criterion, shares, chosen.mask_order, replacement)
        if chosen.rule:
            arms += rules_by_score(run.store, ranking_run, chosen.criterion, shares, replacement)
    if chosen.controls:
        arms += random_controls(run.facts.grid, arms, chosen.controls, replacement)
    return run_evaluation(config, run, [*arms, *plans, *models], questions=questions)
