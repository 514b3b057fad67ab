"""Texts that choose heads, and held-out texts that judge the result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.pruning.calibration_texts import TextConfig

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
