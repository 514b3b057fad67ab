"""Options of verbs that read a corpus as token sequences."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.corpora import CorpusReport, TokenPlan
    from headscan.pipelines.runs.identity import ModelIdentity
    from headscan.pipelines.runs.run_options import RunOptions
    from headscan.pipelines.scan.run_shards import CorpusRunConfig, CorpusRunResult

    ConfigT = TypeVar("ConfigT", bound=CorpusRunConfig)


def add_sequences(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus and of its sequences."""
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument(
        "--corpus",
        help="file or folder (.txt, .py, .jsonl, .parquet, .csv, ...; text and JSON also .gz or .zst), data set on the "
        "hub, or a built-in corpus: python-stdlib, python-stdlib-modules, python-stdlib-heldout (default: "
        f"required, except for `demo`: {shared.DEMO_CORPUS})",
    )
    shared.add_corpus(corpus)
    corpus.add_argument("--limit-documents", type=arguments.count, help="maximum number of documents (default: all)")
    tokens = parser.add_argument_group("sequences")
    tokens.add_argument(
        "--max-tokens",
        type=arguments.count,
        help="maximum sequence length (default: the model's context, at most 2048)",
    )
    tokens.add_argument(
        "--mode",
        choices=("truncate", "chunk", "pack"),
        default="truncate",
        help="truncate: the first tokens of a document; chunk: every document in pieces; pack: documents joined into "
        "full sequences, where queries also attend to earlier documents (default: truncate)",
    )
    tokens.add_argument(
        "--bos",
        choices=("auto", "always", "never"),
        default="auto",
        help="BOS token before each sequence; auto follows the tokenizer (default: auto)",
    )
    tokens.add_argument(
        "--min-tokens", type=arguments.count, default=2, help="minimum sequence length in tokens (default: 2)"
    )
    tokens.add_argument("--limit-sequences", type=arguments.count, help="maximum number of sequences (default: all)")
    tokens.add_argument(
        "--shard-size",
        type=arguments.count,
        default=64,
        help="number of sequences stored and resumed together (default: 64)",
    )


def measure_corpus(
    options: argparse.Namespace,
    config_of: Callable[..., ConfigT],
    measure: Callable[[ConfigT, RunOptions], CorpusRunResult],
    **settings: Any,
) -> str:
    """Measure the corpus of a command line, print the counts, and return the id of the run.

    Args:
        config_of: Makes the settings of the run.
        measure: Runs it.
        settings: Settings in addition to those of every run over a corpus.
    """
    from headscan.pipelines.runs.identity import identify

    shared.require_corpus(options)
    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    tokens = token_plan(options, identity)
    corpus = shared.corpus_spec(options, options.limit_documents)
    config = config_of(model=spec, corpus=corpus, tokens=tokens, shard_size=options.shard_size, **settings)
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=tokens.max_tokens)
    result = measure(
        replace(config, batch_tokens=plan.batch_tokens),
        device_options.run_options(options, store, spec, plan.placement, identity),
    )
    if result.already_done:
        print(f"run {result.run_id} is complete in {options.store}: nothing to do")
        return result.run_id
    if result.report is not None:
        say_counts(options, tokens, result.report)
    done = f"{result.measured} shards measured, {result.skipped} stored before"
    print(f"run {result.run_id}: {done}, in {options.store}")
    return result.run_id


def token_plan(options: argparse.Namespace, identity: ModelIdentity) -> TokenPlan:
    """Return the sequences of a command line."""
    from headscan.pipelines.corpora import TokenPlan
    from headscan.pipelines.runs.text_lengths import longest_text

    return TokenPlan(
        longest_text(identity, options.max_tokens),
        mode=options.mode,
        bos=options.bos,
        min_tokens=options.min_tokens,
        limit_sequences=options.limit_sequences,
    )


def say_counts(options: argparse.Namespace, tokens: TokenPlan, report: CorpusReport) -> None:
    """Print counts of a corpus that was read."""
    for line in report.lines():
        shared.say(line)
    if options.mode == "truncate" and report.truncated:
        shared.say("only the beginning of long documents was measured: --mode chunk measures all of them")
    if tokens.attention_across_documents:
        shared.say("documents share sequences (--mode pack): queries attended across documents")
