"""measure every attention head on a corpus

    headscan scan MODEL --corpus texts/ --store s.duckdb
    headscan scan MODEL --corpus data.parquet --column text --mode chunk --panel full

The same command again resumes an interrupted scan, and does nothing if the scan is complete.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK, PANELS, PROFILES, STATISTICS
from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument(
        "--corpus",
        required=True,
        help="file or folder (.txt, .py, .jsonl, .parquet, .csv, ...; text and JSON also .gz or .zst), data set on the "
        "hub, or a built-in corpus: python-stdlib, python-stdlib-heldout",
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
    measure = parser.add_argument_group("statistics")
    choice = measure.add_mutually_exclusive_group()
    choice.add_argument(
        "--panel",
        choices=PANELS,
        default="fast",
        help="fast: statistics from fused attention; full: also statistics and profiles that need the attention "
        "weights (default: fast)",
    )
    choice.add_argument(
        "--statistics",
        type=arguments.names("statistic", (*STATISTICS, *PROFILES)),
        default=(),
        help=f"comma-separated statistics instead of a panel: {', '.join((*STATISTICS, *PROFILES))}",
    )
    measure.add_argument(
        "--keep-nonfinite",
        action="store_true",
        help="NaN and infinite values stored as NULL (default: such a value ends the scan)",
    )
    measure.add_argument(
        "--sink",
        type=arguments.count,
        default=DEFAULT_SINK,
        help=f"number of first keys that count as the sink (default: {DEFAULT_SINK})",
    )
    measure.add_argument(
        "--recent",
        type=arguments.count,
        default=DEFAULT_RECENT,
        help=f"number of last keys that count as recent (default: {DEFAULT_RECENT})",
    )
    measure.add_argument(
        "--shard-size",
        type=arguments.count,
        default=64,
        help="number of sequences stored and resumed together (default: 64)",
    )


def run(options: argparse.Namespace) -> None:
    from headscan.attention.attention_request import MassWidths
    from headscan.pipelines.corpora import TokenPlan
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.scan.run_scan import ScanConfig, default_max_tokens, scan

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    tokens = TokenPlan(
        default_max_tokens(identity) if options.max_tokens is None else options.max_tokens,
        mode=options.mode,
        bos=options.bos,
        min_tokens=options.min_tokens,
        limit_sequences=options.limit_sequences,
    )
    config = ScanConfig(
        model=spec,
        corpus=shared.corpus_spec(options, options.limit_documents),
        tokens=tokens,
        panel=options.panel,
        statistics=options.statistics,
        keep_nonfinite=options.keep_nonfinite,
        widths=MassWidths(options.sink, options.recent),
        shard_size=options.shard_size,
    )
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=tokens.max_tokens)
    result = scan(
        replace(config, batch_tokens=plan.batch_tokens),
        store,
        lambda: device_options.open_replicas(options, spec, plan.placement),
        identity=identity,
        resume_anyway=options.resume_anyway,
        say=shared.say,
    )
    if result.nonfinite_rows:
        shared.say(
            f"{result.nonfinite_rows} rows of head_statistics hold values that came out as NaN or infinite: NULL there"
        )
    if result.already_done:
        print(f"run {result.run_id} is complete in {options.store}: nothing to do")
        return
    if result.report is not None:
        for line in result.report.lines():
            shared.say(line)
        if options.mode == "truncate" and result.report.truncated:
            shared.say("only the beginning of long documents was measured: --mode chunk measures all of them")
        if tokens.attention_across_documents:
            shared.say("documents share sequences (--mode pack): queries attended across documents")
    done = f"{result.measured} shards measured, {result.skipped} stored before"
    print(f"run {result.run_id}: {done}, in {options.store}")
