"""Options of what replaces the output of ablated heads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared

if TYPE_CHECKING:
    from headscan.pipelines.evaluate.collect_values import ValueConfig

#: Names of `headscan.ablation.replacements.Value`, known without torch.
_VALUES = ("zero", "mean", "resample")


def add_replace(group: argparse._ArgumentGroup) -> None:
    """Add the option of the value."""
    group.add_argument(
        "--replace",
        choices=_VALUES,
        default="zero",
        help="output of ablated heads: zero (tests whether they are inactive), mean (their mean on --corpus: constant) "
        "or resample (their output on another text of --corpus: independent of the input) (default: zero)",
    )


def add_replace_texts(parser: argparse.ArgumentParser) -> None:
    """Add the options of the texts whose outputs replace those of ablated heads."""
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--corpus",
        help="texts of --replace mean and resample: file, folder, data set on the hub, or a built-in corpus (default: "
        "none)",
    )
    shared.add_corpus(texts)


def check_texts(options: argparse.Namespace) -> None:
    """Raise UsageError if the texts have no effect."""
    if options.corpus is not None and options.replace == "zero":
        raise arguments.UsageError("--corpus has no effect with --replace zero: leave it out, or use mean or resample")


def value_config(options: argparse.Namespace) -> ValueConfig:
    """Return what replaces the output of ablated heads.

    Raises:
        InterventionError: The corpus is missing.
    """
    from headscan.pipelines.evaluate.collect_values import ValueConfig

    if options.replace == "zero":
        return ValueConfig(options.replace, None)
    if options.corpus is None and options.model == shared.DEMO_MODEL:
        shared.require_corpus(options)
    corpus = None if options.corpus is None else shared.corpus_spec(options)
    return ValueConfig(options.replace, corpus)
