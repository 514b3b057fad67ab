"""every score at every threshold on a task, with masks and random controls: which heads can go

    headscan sweep MODEL --tasks mmlu --num-fewshot 5
    headscan sweep MODEL --tasks mmlu --scores output_norm_ln,first_token_weight --quantiles 0.1,0.2 --seeds 5

The task's prompts are recorded once; the thresholds are quantiles of the recorded scores. Then every arm answers every
question. Stopped, the same command goes on where it was. `headscan report` draws the curves.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.catalog import SCORES
from pipelines.cli import options as shared

if TYPE_CHECKING:
    from analysis.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    shared.add_devices(parser)
    shared.add_tasks(parser)
    arms = parser.add_argument_group("arms")
    arms.add_argument("--scores", default="all", help="rules by these scores, with commas between (default: all 15)")
    arms.add_argument(
        "--quantiles",
        default="0,0.05,0.1,0.15,0.2,0.25,0.3",
        help="shares of heads to silence, with commas between (default: 0 to 0.3 in steps of 0.05)",
    )
    arms.add_argument(
        "--masks",
        default="output_norm_ln",
        help="static masks by these scores, `all` or `none` (default: output_norm_ln)",
    )
    arms.add_argument(
        "--mask-order",
        choices=("mean", "inactive"),
        default="mean",
        help="masks take heads by their mean score, or by the share of inputs in which they are inactive",
    )
    arms.add_argument(
        "--seeds", type=int, default=3, help="random controls at every share, of rules and of masks (default: 3)"
    )


def run(options: argparse.Namespace) -> None:
    from analysis.verdicts import judge
    from headscan.errors import InterventionError
    from pipelines.sweep import SweepConfig, sweep

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    try:
        quantiles = tuple(float(part) for part in options.quantiles.split(","))
    except ValueError:
        raise InterventionError(
            f"--quantiles {options.quantiles}: write numbers from 0 to 1, for example 0.1,0.2"
        ) from None
    plan = shared.placement(options, spec, tokens=shared.TASK_TOKENS, evaluates=True)
    config = SweepConfig(
        evaluation=shared.evaluate_config(options, spec, plan.batch_tokens),
        scores=_scores(options.scores),
        quantiles=quantiles,
        masks=_scores(options.masks),
        mask_order=options.mask_order,
        seeds=options.seeds,
    )
    store = shared.open_store(options)
    with shared.open_replicas(options, spec, plan.placement) as pool:
        runs = sweep(config, store, pool, say=shared.say)
    print(f"scan {runs.scan_run} and sweep {runs.evaluate_run} in {options.store}\n")
    print(curves_text(store, runs.evaluate_run))
    verdict = judge(store, runs.evaluate_run)
    if verdict.unfinished:
        print(f"\n{verdict.progress}")
    tried = [arm for arm in verdict.arms if not arm.is_random]
    removable = [arm.name for arm in tried if arm.removable]
    print(f"\nremovable within one point: {', '.join(removable) or 'no arm'}")
    if removable:
        print(f"The best of {len(tried)} arms tried on the same questions: confirm what you take on others.")


def curves_text(store: Store, run_id: str) -> str:
    """A table with a row for each curve: accuracy in percent at every nominal share, and the verdict."""
    from analysis.paired import LEAST_BASELINE, LEAST_QUESTIONS
    from analysis.sweeps import read_curves
    from pipelines.cli.tables import text_table

    rows = []
    curves = read_curves(store, run_id)
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
    return (
        "Accuracy in percent at each nominal share of heads (in brackets: the share really silenced); the share that\n"
        "can be silenced within one point, and strictly: the same of the interval's lower end, as far as no recall\n"
        f"is lost (empty with fewer than {LEAST_QUESTIONS} questions, or where the model is right on less than"
        f" {LEAST_BASELINE:g} % of them):\n\n" + text_table(rows)
    )


def _scores(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(SCORES)
    if text == "none":
        return ()
    # What is no name is refused with a suggestion, an empty one, too.
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))
