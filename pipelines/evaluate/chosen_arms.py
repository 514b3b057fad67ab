"""The arms of an evaluation as a user names them: heads, scores, rules, plans and other models."""

from __future__ import annotations

from dataclasses import replace

from headscan.analysis.heads.head_roles import find_mask
from headscan.pipelines.evaluate.run_evaluation import evaluate
from headscan.pipelines.evaluate.tasks import Questions
from headscan.pipelines.kv.plan_arms import check_plan, plan_arms
from headscan.pipelines.runs.head_orders import find_run
from headscan.pipelines.runs.model_identity import identify
from headscan.pipelines.runs.run_context import Run
from headscan.pipelines.scoring.arms import BASELINE, controls, mask_arm, model_arm, scored_masks, scored_rules
from headscan.pipelines.scoring.replacements import collect_replacement
from headscan.pipelines.settings.evaluation_settings import ChosenArms, EvaluateConfig


def evaluate_chosen(config: EvaluateConfig, chosen: ChosenArms, run: Run) -> tuple[str, int]:
    """Evaluate the baseline and the chosen arms; return the run's id and the number of arms, the baseline included."""
    store, identity = run.store, run.identity
    found = find_mask(store, chosen.mask, identity.columns()).heads if chosen.mask else ()
    ordering = None if chosen.score is None else find_run(store, identity, chosen.score, chosen.run_id)
    others = [replace(config.model, source=source, revision=None) for source in dict.fromkeys(chosen.models)]
    compared = [model_arm(other, identify(other), identity) for other in others]
    replaces = chosen.replacement.value != "zero"
    questions = Questions(config.tasks, config.recall, identity, config.text) if replaces else None
    replacement = collect_replacement(chosen.replacement, run, 0 if questions is None else questions.longest_input())
    arms = [BASELINE, *(mask_arm(heads, replacement) for heads in (chosen.heads, found) if heads)]
    if chosen.score is not None and ordering is not None:
        arms += scored_masks(store, ordering, chosen.score, [chosen.share], chosen.order, replacement)
        if chosen.rule:
            arms += scored_rules(store, ordering, chosen.score, [chosen.share], replacement)
    if chosen.controls:
        arms += controls(run.facts.grid, arms, chosen.controls, replacement)
    for plan in chosen.plans:
        check_plan(plan, run)
        arms += plan_arms(plan, chosen.plan_modes, chosen.controls)
    arms += compared
    return evaluate(config, run, arms, questions=questions), len(arms)
