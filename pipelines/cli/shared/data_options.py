"""Options of verbs that read labelled examples."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.labelled.example_file import DataSpec


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
    from headscan.pipelines.labelled.example_file import DataSpec

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
