"""measure the importance of every attention head from derivatives of the loss

    headscan importance MODEL --corpus texts/ --store s.duckdb
    headscan rank --by importance --store s.duckdb

Decoders predict the next token, encoders masked tokens, encoder-decoders their own input. The same command again
resumes an interrupted run, and does nothing if the run is complete.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from headscan.pipelines.cli.shared import corpus_options, device_options
from headscan.pipelines.cli.shared import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    corpus_options.add_sequences(parser)
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--reduction",
        choices=("mean", "sum"),
        default="mean",
        help="loss of a sequence: mean or sum of the losses of its tokens (default: mean)",
    )


def run(options: argparse.Namespace) -> None:
    from headscan.pipelines.importance.run_importance import ImportanceConfig, run_importance
    from headscan.pipelines.runs.identity import identify

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    tokens = corpus_options.token_plan(options, identity)
    config = ImportanceConfig(
        model=spec,
        corpus=shared.corpus_spec(options, options.limit_documents),
        tokens=tokens,
        reduction=options.reduction,
        shard_size=options.shard_size,
    )
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=tokens.max_tokens)
    result = run_importance(
        replace(config, batch_tokens=plan.batch_tokens),
        store,
        lambda: device_options.open_replicas(options, spec, plan.placement),
        identity=identity,
        resume_anyway=options.resume_anyway,
        say=shared.say,
    )
    if result.already_done:
        print(f"run {result.run_id} is complete in {options.store}: nothing to do")
        return
    if result.report is not None:
        corpus_options.say_counts(options, tokens, result.report)
    done = f"{result.measured} shards measured, {result.skipped} stored before"
    print(f"run {result.run_id}: {done}, in {options.store}")
