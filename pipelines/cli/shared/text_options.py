"""Options of verbs that read texts: a corpus as token sequences, labelled examples, or texts that choose and judge."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.corpora import CorpusReport, TokenPlan
    from headscan.pipelines.runs.identity import ModelIdentity
    from headscan.pipelines.runs.run_options import RunOptions
    from headscan.pipelines.scan.run_shards import CorpusRunConfig, CorpusRunResult

    ConfigT = TypeVar("ConfigT", bound=CorpusRunConfig)
    from headscan.pipelines.ablate.labelled_texts import DataSpec
    from headscan.pipelines.pruning.calibration_texts import TextConfig


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
    from headscan.pipelines.runs.run_options import longest_text

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


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the file of examples."""
    group = parser.add_argument_group("labelled examples")
    group.add_argument(
        "--data",
        metavar="FILE",
        help="labelled examples instead of a corpus: .tsv (text, tab, label; or source, tab, target) or .jsonl (keys "
        "text and label, or source and target)",
    )
    group.add_argument("--limit-examples", type=arguments.count, help="maximum number of examples (default: all)")


def data_spec(options: argparse.Namespace) -> DataSpec:
    """Return the examples of a command line."""
    from headscan.pipelines.ablate.labelled_texts import DataSpec

    return DataSpec(options.data, options.limit_examples)


def check_data(options: argparse.Namespace, others: Mapping[str, Any]) -> None:
    """Raise UsageError if options without effect are set.

    Args:
        others: Options without effect on examples, with their defaults.
    """
    if options.data is None:
        if options.limit_examples is not None:
            raise arguments.UsageError("--limit-examples has no effect without --data: leave it out")
        return
    for name, default in others.items():
        if getattr(options, name) != default:
            flag = f"--{name.replace('_', '-')}"
            raise arguments.UsageError(f"{flag} has no effect with --data: leave one of them out")


def is_classifier(options: argparse.Namespace) -> bool:
    """Return True if the model was saved with a classification head."""
    from headscan.checkpoints.sources import load_config
    from headscan.models.model_class import is_classifier

    spec = shared.model_spec(options)
    return is_classifier(load_config(spec.source, spec.revision, spec.trust_remote_code))


#: Repairs of the projections that remain.
REPAIRS = ("none", "mean", "o", "o+v", "o+down", "o+v+down")
#: Of the demo: length of its recall questions, and of its texts.
_DEMO_RECALL, _DEMO_TOKENS = 256, 512


def add_texts(parser: argparse.ArgumentParser, *, demo_sequences: int) -> None:
    """Add the options of the texts.

    Args:
        demo_sequences: Number of texts of the demo.
    """
    parser.set_defaults(demo_sequences=demo_sequences)
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--corpus",
        help="file, folder, data set on the hub, or a built-in corpus: python-stdlib, python-stdlib-modules, "
        "python-stdlib-heldout (default: "
        "required, except for `demo`)",
    )
    shared.add_corpus(group)
    group.add_argument(
        "--max-tokens",
        type=arguments.count,
        help="length of texts in tokens (default: the model's context, at most 2048)",
    )
    group.add_argument(
        "--sequences",
        type=arguments.count,
        help="number of texts; one half chooses and repairs, the other is held out to measure the loss (default: 256; "
        f"of the demo {demo_sequences})",
    )


def check_texts(options: argparse.Namespace) -> None:
    """Raise UsageError if a corpus is missing, or an option has no effect."""
    if options.model == shared.DEMO_MODEL and options.include_path is not None and options.tasks is None:
        raise arguments.UsageError("--include-path has no effect on the demo without --tasks: name tasks, too")
    if options.corpus is None and options.model != shared.DEMO_MODEL:
        raise arguments.UsageError("--corpus is required: name a text to calibrate on")


def text_config(options: argparse.Namespace) -> TextConfig:
    """Return the settings of the texts."""
    from headscan.pipelines.corpora import CorpusSpec
    from headscan.pipelines.pruning.calibration_texts import TextConfig

    if options.corpus is None:
        # The demo model has read the standard library, but not these modules.
        return TextConfig(
            CorpusSpec("python-stdlib-modules"),
            CorpusSpec("python-stdlib-heldout"),
            options.sequences or options.demo_sequences,
            options.max_tokens or _DEMO_TOKENS,
        )
    chosen = {} if options.sequences is None else {"sequences": options.sequences}
    return TextConfig(shared.corpus_spec(options), max_tokens=options.max_tokens, **chosen)


def ask_the_demo(options: argparse.Namespace, scratch: Path, *, questions: int, recall: int) -> None:
    """Fill in the demo's own task and recall questions, unless tasks are named.

    Args:
        scratch: Folder of the task.
        questions: Number of its questions.
        recall: Number of recall questions of each kind.
    """
    if options.tasks is None and options.model == shared.DEMO_MODEL:
        from headscan.pipelines.corpora.stdlib_files import held_out_files
        from headscan.pipelines.demo.demo_task import TASK_NAME, write_task

        options.include_path = str(write_task(scratch / "task", held_out_files(), questions))
        options.tasks = (TASK_NAME,)
        options.recall_lengths = options.recall_lengths or (_DEMO_RECALL,)
        options.recall_questions = options.recall_questions or recall
    options.tasks = options.tasks or ()
