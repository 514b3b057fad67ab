"""evaluate every score at every share on a task, with masks and random controls

    headscan sweep MODEL --tasks mmlu --num-fewshot 5
    headscan sweep MODEL --tasks mmlu --scores output_norm_ln,first_token_weight --quantiles 0.1,0.2 --seeds 5
    headscan sweep MODEL --tasks mmlu --replace mean --corpus texts/

The prompts are recorded once; thresholds are quantiles of the recorded scores. Then every arm answers every question.
Half of the questions select the best rule and the best mask, the other half judges them. The same command again
resumes. `headscan report` draws the curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from headscan.catalog import SCORES
from headscan.pipelines.cli.intervene import replace_options
from headscan.pipelines.cli.shared import arguments, device_options, task_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.flag_names import with_flags
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.verdicts.confirmation import Choice
    from headscan.analysis.verdicts.curves import Curve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    task_options.add_tasks(parser)
    arms = parser.add_argument_group("arms")
    known = arguments.names("score", SCORES, {"all": tuple(SCORES), "none": ()})
    arms.add_argument(
        "--scores",
        type=known,
        default="all",
        help="comma-separated scores of the rules, `all` or `none` (default: all)",
    )
    arms.add_argument(
        "--quantiles",
        type=arguments.listed(arguments.number(0, 1, below=True)),
        default="0,0.05,0.1,0.15,0.2,0.25,0.3",
        help="comma-separated shares of heads to ablate (default: 0 to 0.3 in steps of 0.05)",
    )
    arms.add_argument(
        "--masks",
        type=known,
        default="output_norm_ln",
        help="comma-separated scores of the masks, `all` or `none` (default: output_norm_ln)",
    )
    arms.add_argument(
        "--mask-order",
        choices=("mean", "inactive"),
        default="mean",
        help="order of the masks' heads: by mean score, or by the share of inputs in which they are inactive "
        "(default: mean)",
    )
    arms.add_argument(
        "--seeds",
        type=arguments.whole(0),
        default=3,
        help="number of random controls per share, for rules and for masks; 20 x the number of scores - 1 can show that"
        " the choice among them is better than chance (default: 3)",
    )
    replace_options.add_replace(arms)
    task_options.add_confirm(parser.add_argument_group("verdict"))
    replace_options.add_replace_texts(parser)


def run(options: argparse.Namespace) -> Result:
    from headscan.analysis.verdicts.confirmation import judge_sweep
    from headscan.analysis.verdicts.curves import read_curves
    from headscan.analysis.verdicts.judge import judge
    from headscan.pipelines.cli.shared.arm_rows import arm_row
    from headscan.pipelines.evaluate.run_sweep import SweepConfig, sweep

    replace_options.check_texts(options)
    shared.quiet_libraries()
    spec = shared.model_spec(options)
    config = SweepConfig(
        evaluation=task_options.evaluate_config(options, spec),
        scores=options.scores,
        quantiles=options.quantiles,
        masks=options.masks,
        mask_order=options.mask_order,
        seeds=options.seeds,
        confirm=options.confirm,
        value=replace_options.value_config(options),
    )
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=task_options.TASK_TOKENS, evaluates=True)
    config = replace(config, evaluation=replace(config.evaluation, batch_tokens=plan.batch_tokens))

    def say(line: str) -> None:
        shared.say(with_flags(line, vars(options)))

    with device_options.open_replicas(options, spec, plan.placement) as pool:
        runs = sweep(config, store, pool, resume_anyway=options.resume_anyway, say=say)
    curves, verdict = read_curves(store, runs.evaluate_run), judge(store, runs.evaluate_run)
    choices = judge_sweep(store, verdict, confirm=config.confirm)

    def text() -> str:
        parts = [
            f"scan {runs.scan_run} and sweep {runs.evaluate_run} in {options.store}",
            curves_text(curves),
            verdict.progress if verdict.unfinished else "",
            choices_text(choices, confirm=config.confirm),
        ]
        return "\n\n".join(filter(None, parts))

    facts = {
        "run_id": runs.evaluate_run,
        "scan_run_id": runs.scan_run,
        "store": options.store,
        "unfinished": verdict.unfinished,
        "choices": [{**asdict(choice), "verdict": arm_row(choice.verdict)} for choice in choices],
    }
    return Result(curves, text, facts)


def choices_text(choices: Sequence[Choice], *, confirm: bool) -> str:
    """Return a sentence for each selected arm, and the removable ones."""
    removable = [choice.verdict.name for choice in choices if choice.verdict.removable]
    how = "confirmed on other questions" if confirm else "not corrected for the selection"
    return "\n".join(
        [
            *(choice.sentence() for choice in choices),
            f"removable within one point, {how}: {', '.join(removable) or 'no arm'}",
        ]
    )


def curves_text(curves: Sequence[Curve]) -> str:
    """Return the curves as a table, in percent."""
    from headscan.analysis.verdict_limits import LEAST_BASELINE, LEAST_QUESTIONS
    from headscan.pipelines.runs.text_tables import text_table

    rows = []
    shares = sorted({point.share for curve in curves for point in curve.points})
    for curve in curves:
        found = {point.share: point for point in curve.points}
        rows.append(
            {"score": curve.name, "kind": curve.kind}
            | {
                f"{100 * share:g}%": f"{100 * found[share].accuracy:.1f} ({100 * found[share].zeroed_share:.1f})"
                if share in found
                else ""
                for share in shares
            }
            | {
                "removable %": round(100 * curve.removable_share, 2),
                "strictly %": None
                if curve.removable_share_strict is None
                else round(100 * curve.removable_share_strict, 2),
            }
        )
    if not rows:
        return "no curves: the tasks have no right answers to count"
    questions = max(point.questions for curve in curves for point in curve.points)
    return (
        "Accuracy in percent at each nominal share of heads (in brackets: the share really ablated).\n"
        "removable: the largest share of heads at which the curve, straight between the tested shares, is within one\n"
        "point of the baseline. strictly: the largest tested share such that it and all smaller ones pass: the lower\n"
        "end of the interval is above -1 point and no recall is lost. strictly is empty with fewer than"
        f" {LEAST_QUESTIONS} questions,\n"
        f"or if the model is right on less than {LEAST_BASELINE:g} % of them. Both use all {questions:,} questions and"
        " are not corrected\n"
        f"for comparing {len(curves)} curves.\n\n" + text_table(rows)
    )
