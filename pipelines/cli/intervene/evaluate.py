"""ablate heads while lm-eval's tasks run, and compare with the baseline

    headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0
    headscan evaluate MODEL --tasks mmlu --mask "gate 20% of texts 1a2b3c"
    headscan evaluate MODEL --tasks mmlu --score output_norm_ln --share 0.1 --rule --controls 19
    headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0 --replace mean --corpus texts/
    headscan evaluate MODEL --tasks mmlu --plan head_plan.json --controls 19
    headscan evaluate MODEL --tasks mmlu --models pruned/,finetuned/

Heads are listed by hand, or chosen by a score from a scan of the same model in the store, or keep the KV cache of a
plan. Other models, such as pruned ones, can answer the same questions. Without any of these only the baseline runs. The
same command again resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.catalog import SCORES
from headscan.pipelines.cli.intervene import replace_options
from headscan.pipelines.cli.shared import arguments, device_options, task_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json
from headscan.pipelines.kv.plan_modes import PLAN_MODES

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.pipelines.scoring.arms import AblationValue, Arm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    task_options.add_tasks(parser)
    arms = parser.add_argument_group("arms")
    arms.add_argument(
        "--heads",
        type=arguments.listed(arguments.head),
        nargs="+",
        action=arguments.Flat,
        default=[],
        metavar="LAYER:HEAD",
        help="comma-separated heads of a mask (default: none)",
    )
    arms.add_argument(
        "--mask", metavar="NAME", help="name or id of a mask in the store whose heads are ablated (default: none)"
    )
    arms.add_argument(
        "--score",
        type=arguments.one_name("score", SCORES),
        help="score that chooses the heads, from a scan in the store (default: output_norm_ln)",
    )
    arms.add_argument(
        "--share", type=arguments.share, help="share of heads to ablate, chosen by the score (default: 0.1)"
    )
    arms.add_argument(
        "--mask-order",
        choices=("mean", "inactive"),
        default="mean",
        help="order of the heads: by mean score, or by the share of inputs in which they are inactive (default: mean)",
    )
    arms.add_argument("--run", help="first characters of the scan's id (default: the newest scan of this model)")
    arms.add_argument(
        "--rule",
        action="store_true",
        help="also evaluate the rule, which ablates per input the heads beyond the quantile",
    )
    arms.add_argument(
        "--plan",
        type=arguments.words,
        nargs="+",
        action=arguments.Flat,
        default=[],
        metavar="FILE",
        help="comma-separated files of KV-cache plans, from `headscan plan` (default: none)",
    )
    arms.add_argument(
        "--plan-mode",
        type=arguments.listed(arguments.one_name("plan mode", PLAN_MODES)),
        nargs="+",
        action=arguments.Flat,
        default=["forward"],
        metavar="MODE",
        help="forward: all tokens see what the plan keeps; decode: keys are evicted after the context; or both, with "
        "a comma (default: forward)",
    )
    arms.add_argument(
        "--models",
        type=arguments.listed(arguments.model),
        nargs="+",
        action=arguments.Flat,
        default=[],
        metavar="MODEL",
        help="comma-separated folders or names of models with the same tokenizer, to compare with MODEL; one is loaded "
        "at a time (default: none)",
    )
    arms.add_argument(
        "--controls",
        type=arguments.whole(0),
        default=0,
        metavar="N",
        help="number of random controls per mask (as many heads), per rule (heads drawn for each input) and per plan "
        "(as many bytes); at least 19 can show that a choice is better than chance (default: 0)",
    )
    replace_options.add_replace(arms)
    replace_options.add_replace_texts(parser)


def run(options: argparse.Namespace) -> Result:
    from headscan.analysis.plans import load_plan

    plans = [load_plan(path) for path in options.plan]  # the imports below load torch, which takes seconds
    from headscan.analysis.verdicts.judge import judge
    from headscan.checkpoints.sources import load_config
    from headscan.models.model_class import check_bounds
    from headscan.pipelines.cli.shared.arm_rows import arm_rows
    from headscan.pipelines.evaluate.collect_values import collect_value
    from headscan.pipelines.evaluate.evaluation_requests import Questions
    from headscan.pipelines.evaluate.run_evaluation import evaluate
    from headscan.pipelines.kv.plan_arms import check_plan, plan_arms
    from headscan.pipelines.pruning.head_orders import mask_heads
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.runs.run_records import RunContext
    from headscan.pipelines.scoring.arms import BASELINE, controls, find_scan, model_arm

    _check_replacement(options)
    value_config = replace_options.value_config(options)
    shared.quiet_libraries()
    spec = shared.model_spec(options)
    store = shared.open_store(options, writes=True)
    config = task_options.evaluate_config(options, spec)
    if options.heads:
        check_bounds(load_config(spec.source, spec.revision, spec.trust_remote_code), options.heads)
    plan = device_options.placement(options, spec, tokens=task_options.TASK_TOKENS, evaluates=True)
    config = replace(config, batch_tokens=plan.batch_tokens)
    identity = identify(spec)
    masks = [heads for heads in (options.heads, options.mask and mask_heads(store, options.mask, identity)) if heads]
    scan_run = find_scan(store, identity, options.run) if _uses_score(options) else None
    others = [replace(spec, source=source, revision=None) for source in dict.fromkeys(options.models)]
    compared = [model_arm(other, identify(other), identity) for other in others]
    questions = Questions(config.tasks, config.recall, identity) if options.replace != "zero" else None
    with device_options.open_replicas(options, spec, plan.placement) as pool:
        context = RunContext(identity, pool)
        value = collect_value(value_config, context, 0 if questions is None else questions.longest_input)
        arms = [BASELINE, *_head_arms(options, masks, store, scan_run, value)]
        if options.controls:
            arms += controls(context.facts.grid, arms, options.controls, value)
        for head_plan in plans:
            check_plan(head_plan, context)
            arms += plan_arms(head_plan, options.plan_mode, options.controls)
        run_id = evaluate(
            config,
            store,
            pool,
            arms + compared,
            questions=questions,
            context=context,
            open_model=lambda other: device_options.open_model(options, other, tokens=task_options.TASK_TOKENS),
            resume_anyway=options.resume_anyway,
            say=shared.say,
        )
    title, facts = f"run {run_id} in {options.store}", {"run_id": run_id, "store": options.store}
    if len(arms + compared) == 1:
        return Result([], lambda: title, facts)
    verdict = judge(store, run_id)
    rows = arm_rows((*verdict.arms, *verdict.unjudged))
    return Result(rows, lambda: "\n".join([title, *verdict.sentences()]), {**facts, "unfinished": verdict.unfinished})


def _uses_score(options: argparse.Namespace) -> bool:
    """Return True if a score chooses heads."""
    return bool(options.score or options.share is not None or options.rule or options.run)


def _check_replacement(options: argparse.Namespace) -> None:
    """Raise UsageError if a replacement or its texts have no effect."""
    replace_options.check_texts(options)
    if options.replace != "zero" and not (options.heads or options.mask or _uses_score(options)):
        raise arguments.UsageError(f"--replace {options.replace} needs ablated heads: give --heads, --mask or --score")


def _head_arms(
    options: argparse.Namespace,
    masks: Sequence[Sequence[tuple[int, int]]],
    store: Store,
    scan_run: str | None,
    value: AblationValue,
) -> list[Arm]:
    """Return the masks and rules of a command line.

    Args:
        masks: Heads of the masks that are named.
        scan_run: The scan of the scores; None has none.
    """
    from headscan.pipelines.scoring.arms import mask_arm, scored_masks, scored_rules

    arms = [mask_arm(heads, value) for heads in masks]
    if scan_run is not None:
        score, share = options.score or "output_norm_ln", 0.1 if options.share is None else options.share
        arms += scored_masks(store, scan_run, score, [share], options.mask_order, value)
        if options.rule:
            arms += scored_rules(store, scan_run, score, [share], value)
    return arms
