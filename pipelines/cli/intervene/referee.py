"""compare every published criterion of removing heads on one model

    headscan referee demo
    headscan referee MODEL --corpus texts/ --tasks mmlu --criteria all --shares 0.1,0.2,0.3
    headscan referee MODEL --corpus texts/ --repair o+down
    headscan referee TRANSLATOR --data dev.tsv --criteria importance,effect --shares 0.2,0.4,0.6,0.8,1

All criteria choose heads on the same texts: scores of arXiv 2504.03889, gradient importance (1905.10650), gradient and
entropy (2510.13832), single-head effects, gates (1905.09418), repaired damage, whole layers (2406.15786). Every choice
answers the same questions, next to random heads. Classifiers and encoder-decoders have --data: each criterion removes
the heads of each site. The same command again resumes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.catalog import IMPORTANCES, SCORES
from headscan.pipelines.cli.intervene import labelled_options
from headscan.pipelines.cli.shared import arguments, device_options, task_options, text_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json
from headscan.pipelines.cli.shared.whole_model import WholeModel

if TYPE_CHECKING:
    from headscan.analysis.effects.criterion_points import SitePoint
    from headscan.analysis.store.store import Store
    from headscan.pipelines.referee.comparison import Comparison

#: Questions, recall questions of each kind and texts of the demo: some sixty models answer them.
_DEMO_QUESTIONS, _DEMO_RECALL, _DEMO_SEQUENCES = 30, 20, 96
_OTHERS = ("effect", "gate", "damage", "layer-drop")
_CRITERIA = (*SCORES, *IMPORTANCES, *_OTHERS)
_DEFAULT = ("output_norm_ln", "first_token_weight", "importance", "importance_entropy", *_OTHERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    task_options.add_tasks(parser, required=False)
    text_options.add_texts(parser, demo_sequences=_DEMO_SEQUENCES)
    group = parser.add_argument_group("criteria")
    group.add_argument(
        "--criteria",
        type=arguments.names("criterion", _CRITERIA, {"all": _CRITERIA}),
        default=_DEFAULT,
        help="comma-separated criteria, or `all`: the scores, importance, importance_ln, importance_entropy, effect, "
        f"gate, damage, layer-drop (default: {','.join(_DEFAULT)})",
    )
    group.add_argument(
        "--shares",
        type=arguments.listed(arguments.number(0, 1, above=True)),
        default=(0.1, 0.2, 0.3, 0.4, 0.5),
        help="comma-separated shares of heads to remove, of each site with --data (default: 0.1,0.2,0.3,0.4,0.5)",
    )
    group.add_argument(
        "--seeds", type=arguments.whole(0), default=3, help="number of random controls per share (default: 3)"
    )
    group.add_argument(
        "--repair",
        choices=text_options.REPAIRS,
        default="none",
        help="projections that are solved again after heads are removed; none ablates heads only (default: none)",
    )
    group.add_argument(
        "--iterative",
        action="store_true",
        help="scores, importances and effects are measured again after each share",
    )
    labelled_options.add_labelled(parser)
    parser.add_argument(
        "--rank-data",
        metavar="FILE",
        help="labelled examples that order the heads (default: one half of --data, judged on the other)",
    )


def run(options: argparse.Namespace) -> Result:
    labelled_options.check_labelled(options, {"repair": "none"})
    if options.data is not None:
        return _on_examples(options)
    if options.rank_data is not None:
        raise arguments.UsageError("--rank-data has no effect without --data: leave it out")
    return _on_tasks(options)


def _compared(options: argparse.Namespace, criteria: Sequence[str]) -> Comparison:
    from headscan.pipelines.referee.comparison import Comparison

    return Comparison(tuple(criteria), tuple(options.shares), options.seeds, options.iterative)


def _on_examples(options: argparse.Namespace) -> Result:
    from headscan.pipelines.ablate.labelled_texts import DataSpec
    from headscan.pipelines.referee.choose_heads import MEASURED
    from headscan.pipelines.referee.site_referee import SiteRefereeConfig, site_referee

    criteria = options.criteria
    if criteria == _DEFAULT:
        criteria = [name for name in criteria if name in MEASURED]
        shared.say(f"on labelled examples: {', '.join(criteria)}")
    ranking = None if options.rank_data is None else DataSpec(options.rank_data)
    compared = _compared(options, criteria)
    with labelled_options.opened(options) as (config, texts, store, context):
        run_id, points = site_referee(
            SiteRefereeConfig(config, compared, ranking),
            store,
            context.pool,
            context=context,
            texts=texts,
            resume_anyway=options.resume_anyway,
            say=shared.say,
        )
    return site_result(store, run_id, points)


def _on_tasks(options: argparse.Namespace) -> Result:
    from headscan.pipelines.pruning.repairs import Repair
    from headscan.pipelines.referee.run_referee import RefereeConfig, referee

    text_options.check_texts(options)
    model = WholeModel.of(options)
    with tempfile.TemporaryDirectory() as scratch:
        text_options.ask_the_demo(options, Path(scratch), questions=_DEMO_QUESTIONS, recall=_DEMO_RECALL)
        texts = text_options.text_config(options)
        config = RefereeConfig(
            evaluation=task_options.evaluate_config(options, model.spec),
            compared=_compared(options, options.criteria),
            texts=texts,
            repair=Repair(options.repair),
        )
        with model.opened(texts) as (context, batch_tokens):
            run_id = referee(
                replace(config, evaluation=replace(config.evaluation, batch_tokens=batch_tokens)),
                model.store,
                context,
                lambda other: model.open_other(other, texts),
                resume_anyway=options.resume_anyway,
                say=shared.say,
            )
    return referee_result(model.store, run_id)


def referee_result(store: Store, run_id: str) -> Result:
    """Return the losses of a finished referee, and how far its criteria agree."""
    from headscan.analysis.effects.criterion_points import criterion_points
    from headscan.analysis.effects.rank_agreement import agreements
    from headscan.analysis.verdicts.judge import judge
    from headscan.pipelines.referee.referee_table import agreement_text, criterion_losses, referee_text

    verdict = judge(store, run_id)
    points = criterion_points(store, verdict)
    losses = criterion_losses(points, [arm for arm in (*verdict.arms, *verdict.unjudged) if arm.is_random])
    heads = [(layer, head) for site, layer, head in _heads(store, run_id) if site == "self"]
    agreed = agreements(points, heads)
    return Result(
        losses,
        lambda: "\n\n".join([f"run {run_id} in {store.path}", referee_text(losses), agreement_text(agreed)]),
        {"run_id": run_id, "store": str(store.path), "agreements": agreed, "unfinished": verdict.unfinished},
    )


def site_result(store: Store, run_id: str, points: Sequence[SitePoint]) -> Result:
    """Return what a referee on labelled examples found."""
    from headscan.pipelines.referee.referee_table import (
        agreement_text,
        baseline_text,
        referee_text,
        site_agreements,
        site_losses,
    )

    losses, agreed = site_losses(points), site_agreements(points, _heads(store, run_id))
    parts = [f"run {run_id} in {store.path}", baseline_text(points), referee_text(losses)]
    parts += [agreement_text(agreed)] * bool(agreed)
    return Result(
        losses,
        lambda: "\n\n".join(parts),
        {"run_id": run_id, "store": str(store.path), "agreements": agreed, "baseline": points[0].effect.baseline},
    )


def _heads(store: Store, run_id: str) -> list[tuple[str, int, int]]:
    """Return ``(site, layer, head)`` of all heads of a run's model."""
    grid = next(run["grid"] for run in store.runs() if run["run_id"] == run_id)
    return [(site["site"], site["layer"], head) for site in grid for head in range(site["num_attention_heads"])]
