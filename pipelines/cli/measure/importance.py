"""measure the importance of every attention head from derivatives of the loss

    headscan importance MODEL --corpus texts/ --store s.duckdb
    headscan rank --by importance --store s.duckdb

Decoders predict the next token, encoders masked tokens, encoder-decoders their own input. The same command again
resumes an interrupted run, and does nothing if the run is complete.
"""

from __future__ import annotations

import argparse

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

    corpus_options.measure_corpus(options, ImportanceConfig, run_importance, reduction=options.reduction)
