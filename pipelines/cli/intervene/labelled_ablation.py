"""The part of `headscan ablate` that reads labelled examples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from headscan.pipelines.cli.intervene.effects_text import effects_result, removal_result
from headscan.pipelines.cli.shared import arguments, data_options, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result

#: Options of tasks and texts, with their defaults.
_OF_OTHERS = {"tasks": None, "corpus": None, "sequences": None, "include_path": None, "limit": None, "replace": "zero"}
#: Options of an iterative removal, with their defaults.
_OF_REMOVAL = {"by": None, "rescore": False, "steps": None, "rank_data": None}


def add_iterative(group: argparse._ArgumentGroup) -> None:
    """Add the options of an iterative removal."""
    group.add_argument(
        "--iterative",
        action="store_true",
        help="metric after each step of a removal, least important heads first, by site; needs --data",
    )
    group.add_argument(
        "--by",
        choices=("importance_ln", "importance"),
        help="importance that orders the heads of --iterative, divided by its l2 norm over a layer or as it is "
        "(default: importance_ln)",
    )
    group.add_argument(
        "--rescore", action="store_true", help="importance measured again after each step of --iterative (default: no)"
    )
    group.add_argument("--steps", type=arguments.count, help="number of steps of --iterative (default: 10)")
    group.add_argument(
        "--rank-data",
        metavar="FILE",
        help="labelled examples that order the heads of --iterative (default: one half of --data, judged on the other)",
    )


def add_labelled(parser: argparse.ArgumentParser) -> None:
    """Add the options of labelled examples."""
    data_options.add_data(parser)
    parser.add_argument(
        "--metric",
        choices=("accuracy", "bleu", "loss"),
        help="metric on --data (default: accuracy for classifiers, bleu for encoder-decoders)",
    )


def check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    data_options.check_data(options, _OF_OTHERS)
    if options.data is None and (options.iterative or options.metric is not None):
        flag = "--iterative" if options.iterative else "--metric"
        raise arguments.UsageError(f"{flag} needs --data: name a file of labelled examples")
    if options.iterative and (options.each or options.all_but_one):
        raise arguments.UsageError("--iterative excludes --each and --all-but-one: run two commands")
    for name, default in _OF_REMOVAL.items():
        if not options.iterative and getattr(options, name) != default:
            flag = f"--{name.replace('_', '-')}"
            raise arguments.UsageError(f"{flag} has no effect without --iterative: leave it out")


def run(options: argparse.Namespace, modes: Sequence[str]) -> Result:
    """Measure effects or a removal on labelled examples, and return them."""
    from headscan.pipelines.ablate_labelled.iterative_removal import RemovalPlan, remove_iteratively
    from headscan.pipelines.ablate_labelled.run_arms import LabelledConfig
    from headscan.pipelines.ablate_labelled.single_head_table import labelled_effects
    from headscan.pipelines.labelled.example_file import DataSpec
    from headscan.pipelines.labelled.labelled_texts import read_labelled
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.runs.run_context import RunContext

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    config = LabelledConfig(spec, data_options.data_spec(options), options.metric, options.max_tokens)
    identity = identify(spec)
    texts = read_labelled(config.data, spec, identity, options.max_tokens)
    config.metric_of(texts)
    store = shared.open_store(options, writes=True)
    place = device_options.placement(options, spec, tokens=texts.longest)
    config = replace(config, batch_tokens=place.batch_tokens)
    anyway = options.resume_anyway
    with device_options.open_replicas(options, spec, place.placement) as pool:
        context = RunContext(identity, pool)
        if options.iterative:
            chosen = {name: value for name in ("by", "steps") if (value := getattr(options, name)) is not None}
            ranking = None if options.rank_data is None else DataSpec(options.rank_data)
            plan = RemovalPlan(rescore=options.rescore, rank_data=ranking, **chosen)
            run_id, points = remove_iteratively(
                config, plan, store, pool, context=context, resume_anyway=anyway, say=shared.say
            )
            return removal_result(run_id, options.store, points)
        run_id, effects = labelled_effects(
            config, store, pool, modes, context=context, texts=texts, resume_anyway=anyway, say=shared.say
        )
        return effects_result(run_id, options.store, effects)
