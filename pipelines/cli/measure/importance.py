"""measure the importance of every attention head from derivatives of the loss

    headscan importance MODEL --corpus texts/ --store s.duckdb
    headscan importance CLASSIFIER --data train.tsv
    headscan rank --by importance --store s.duckdb

On a corpus, decoders predict the next token, encoders masked tokens, encoder-decoders their own input. On --data,
classifiers predict labels and encoder-decoders target texts. The same command again resumes an interrupted run, and
does nothing if the run is complete. The last lines show how well two halves of the texts agree on the heads' order.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared import text_options as corpus_options
from headscan.pipelines.cli.shared import text_options as data_options

#: Options of a corpus, and their defaults.
_OF_CORPUS = {
    "config": None,
    "split": "train",
    "column": None,
    "corpus_revision": None,
    "limit_documents": None,
    "mode": "truncate",
    "bos": "auto",
    "min_tokens": 2,
    "limit_sequences": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    data_options.add_data(parser)
    corpus_options.add_sequences(parser)
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--reduction",
        choices=("mean", "sum"),
        default="mean",
        help="loss of a sequence: mean or sum of the losses of its tokens (default: mean)",
    )


def run(options: argparse.Namespace) -> None:
    _check(options)
    _say_agreement(options, _measure_corpus(options) if options.data is None else _measure_data(options))


def _measure_corpus(options: argparse.Namespace) -> str:
    """Measure a corpus, and return the id of the run."""
    from headscan.pipelines.importance.run_importance import ImportanceConfig, run_importance

    if data_options.is_classifier(options):
        raise arguments.UsageError(f"{options.model} is a classifier, and text has no labels. Give --data")
    return corpus_options.measure_corpus(options, ImportanceConfig, run_importance, reduction=options.reduction)


def _say_agreement(options: argparse.Namespace, run_id: str) -> None:
    """Print how well two halves of the sequences agree on the order of the heads, by site."""
    from headscan.analysis.heads.importance_ranking import halves_agreement

    store = shared.open_store(options)
    sites = store.query("SELECT DISTINCT site FROM head_importance WHERE run_id = ? ORDER BY site", [run_id])
    for site in sites["site"].to_pylist():
        for name in ("importance", "sequence_importance"):
            if (found := halves_agreement(store, run_id, name, site=site)) is not None:
                print(f"{name}, site {site}: {found.line()}")


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError if options do not go together."""
    if options.data is None and options.corpus is None and options.model != shared.DEMO_MODEL:
        raise arguments.UsageError("--corpus or --data is required: name a text, or a file of labelled examples")
    if options.data is not None and options.corpus is not None:
        raise arguments.UsageError("--corpus and --data exclude each other: leave one of them out")
    data_options.check_data(options, _OF_CORPUS)


def _measure_data(options: argparse.Namespace) -> str:
    """Measure labelled examples, and return the id of the run."""
    from headscan.pipelines.ablate.labelled_texts import read_labelled
    from headscan.pipelines.importance.run_importance import LabelledImportanceConfig, run_labelled_importance
    from headscan.pipelines.runs.identity import identify

    shared.quiet_libraries()
    spec, data = shared.model_spec(options), data_options.data_spec(options)
    config = LabelledImportanceConfig(spec, data, options.max_tokens, options.reduction, shard_size=options.shard_size)
    identity = identify(spec)
    texts = read_labelled(data, spec, identity, options.max_tokens)
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=texts.longest)
    result = run_labelled_importance(
        replace(config, batch_tokens=plan.batch_tokens),
        device_options.run_options(options, store, spec, plan.placement, identity),
        texts=texts,
    )
    if result.already_done:
        print(f"run {result.run_id} is complete in {options.store}: nothing to do")
        return result.run_id
    print(
        f"run {result.run_id}: {len(texts.texts)} examples, {result.measured} shards measured, {result.skipped} stored"
        f" before, in {options.store}"
    )
    return result.run_id
