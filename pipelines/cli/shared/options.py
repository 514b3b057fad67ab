"""Options that several verbs share: model, store, corpus."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscan.checkpoints.source_folder import DEMO_MODEL as DEMO_MODEL
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.runs.text_tables import printable_lines

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.corpora import CorpusSpec

#: Corpus of the bundled model unless one is named: modules of the standard library that it has not read.
DEMO_CORPUS = "python-stdlib-heldout"

#: Dtypes of loaded weights.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the model and the options of loading it."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=arguments.model,
        nargs="?" if optional else None,
        help="folder saved by transformers, name on the hub, or `demo` for the bundled model",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of the weights; auto keeps the saved one (default: auto)"
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="permission to run Python code from the model's files"
    )
    group.add_argument(
        "--pickled-weights", action="store_true", help="permission to load pickled weights, which can run code"
    )


def add_store(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options of the store."""
    parser.add_argument("--store", default="headscan.duckdb", help="DuckDB file (default: headscan.duckdb)")
    parser.add_argument(
        "--lock-timeout",
        type=arguments.seconds(0),
        default=30.0,
        metavar="SECONDS",
        help="wait for another process that holds the store, in seconds (default: 30)",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the option to resume with changed software."""
    parser.add_argument(
        "--resume-anyway",
        action="store_true",
        help="resume an unfinished run although packages, headscan, the device or the model's code changed; the store "
        "records both (default: an error names the changes)",
    )


def add_corpus(parser: argparse._ArgumentGroup) -> None:
    """Add the options of a data set."""
    parser.add_argument("--config", help="configuration of a hub data set (default: its own)")
    parser.add_argument("--split", default="train", help="split of a hub data set (default: train)")
    parser.add_argument("--column", help="text column (default: `text`, or the only string column)")
    parser.add_argument("--corpus-revision", help="commit of a hub data set (default: the newest)")


def require_corpus(options: argparse.Namespace) -> None:
    """Set the corpus of the bundled model; raise UsageError if that of another model is missing."""
    if options.corpus is None and options.model == DEMO_MODEL:
        options.corpus = DEMO_CORPUS
        say(f"corpus: {DEMO_CORPUS}")
    if options.corpus is None:
        raise arguments.UsageError("--corpus is required: name a file, a folder, a data set or a built-in corpus")


def corpus_spec(options: argparse.Namespace, limit_documents: int | None = None) -> CorpusSpec:
    """Return the corpus of a command line."""
    from headscan.pipelines.corpora import CorpusSpec

    return CorpusSpec(
        options.corpus,
        config=options.config,
        split=options.split,
        column=options.column,
        revision=options.corpus_revision,
        limit_documents=limit_documents,
    )


def model_spec(options: argparse.Namespace) -> ModelSpec:
    """Return the model of a command line."""
    from headscan.model_spec import ModelSpec

    return ModelSpec(
        options.model,
        options.dtype,
        options.revision,
        options.trust_remote_code,
        safetensors=not options.pickled_weights,
    )


def open_store(options: argparse.Namespace, *, writes: bool = False) -> Store:
    """Return the store; a wait for another process is reported.

    Args:
        writes: Raise now, before anything is measured, if the store cannot be written.

    Raises:
        OSError: The folder of the store cannot be written.
    """
    from headscan.analysis.store.store import Store

    path = Path(options.store)
    if writes and not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder that can hold the store", str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the store cannot be written there", str(folder))
    return Store(options.store, lock_timeout=options.lock_timeout, on_wait=say)


def say_run(run: Mapping[str, Any]) -> None:
    """Print which run of the store a verb reads.

    Args:
        run: A row of ``runs``.
    """
    corpus = f" on {run['corpus']}" if run["corpus"] else ""
    began = f"{run['started_at']:%Y-%m-%d %H:%M}"
    say(f"from {run['kind']} {run['run_id']} of {run['model']}{corpus}, {began}, {run['status']}")


def quiet_libraries() -> None:
    """Turn off progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def say(line: str) -> None:
    """Print a line to standard error; standard output is for results."""
    print(printable_lines(line), file=sys.stderr, flush=True)
