"""Options that several verbs share, and how they become settings."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.runs.terminal import printable_lines

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.corpora import CorpusSpec

#: The name by which the bundled model is called.
DEMO_MODEL = "demo"


#: Numbers that weights can be loaded as.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The model and how it is loaded."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="folder saved by transformers, hub name, or `demo`: the bundled model",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto (as saved), float32, bfloat16 or float16 (default: auto)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="let Python code that comes with the model run")
    group.add_argument("--pickled-weights", action="store_true", help="also load weights that are not safetensors")


def add_store(parser: argparse.ArgumentParser) -> None:
    """The DuckDB file."""
    parser.add_argument("--store", default="headscan.duckdb", help="the DuckDB file (default: headscan.duckdb)")
    parser.add_argument(
        "--lock-timeout",
        type=arguments.seconds(0),
        default=30.0,
        metavar="SECONDS",
        help="how long to wait while another process has the store open (default: 30)",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Whether a run resumes with other software."""
    parser.add_argument(
        "--resume-anyway",
        action="store_true",
        help="resume an unfinished run even if packages, headscan, the device or the model's code files changed since; "
        "both are recorded (default: an error names the changes)",
    )


def add_corpus(parser: argparse._ArgumentGroup) -> None:
    """Which texts."""
    parser.add_argument("--config", help="configuration of a data set on the hub")
    parser.add_argument("--split", default="train", help="split of a data set on the hub (default: train)")
    parser.add_argument("--column", help="column with the text (default: `text`, or the only one of strings)")
    parser.add_argument("--corpus-revision", help="commit of a data set on the hub")


def corpus_spec(options: argparse.Namespace, limit_documents: int | None = None) -> CorpusSpec:
    """What to read."""
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
    """What to load."""
    from headscan.model_spec import ModelSpec

    source = options.model
    if source == DEMO_MODEL and not Path(source).exists():
        from headscan.pipelines.demo import MODEL_FOLDER

        source = str(MODEL_FOLDER)
    return ModelSpec(
        source, options.dtype, options.revision, options.trust_remote_code, safetensors=not options.pickled_weights
    )


def open_store(options: argparse.Namespace, *, writes: bool = False) -> Store:
    """The store; a wait for somebody else's lock is reported.

    Args:
        writes: The verb will write it: a place that cannot be written is refused now, before anything is measured.

    Raises:
        OSError: The folder that holds the store, or is to hold it, cannot be written.
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


def quiet_libraries() -> None:
    """Keep other libraries' bars out of the output of a command."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def say(line: str) -> None:
    """A line about the work; results alone go to standard output."""
    print(printable_lines(line), file=sys.stderr, flush=True)
