"""Options of verbs that read a corpus as token sequences."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.corpora import CorpusReport, TokenPlan
    from headscan.pipelines.runs.identity import ModelIdentity


def add_sequences(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus and of its sequences."""
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument(
        "--corpus",
        required=True,
        help="file or folder (.txt, .py, .jsonl, .parquet, .csv, ...; text and JSON also .gz or .zst), data set on the "
        "hub, or a built-in corpus: python-stdlib, python-stdlib-modules, python-stdlib-heldout",
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


def token_plan(options: argparse.Namespace, identity: ModelIdentity) -> TokenPlan:
    """Return the sequences of a command line."""
    from headscan.pipelines.corpora import TokenPlan
    from headscan.pipelines.scan.run_scan import default_max_tokens

    return TokenPlan(
        default_max_tokens(identity) if options.max_tokens is None else options.max_tokens,
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
