"""Options of verbs that ablate heads on labelled examples, and what they name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared import text_options as data_options

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.pipelines.ablate.labelled_arms import LabelledConfig
    from headscan.pipelines.ablate.labelled_texts import LabelledTexts
    from headscan.pipelines.runs.run_records import RunContext


#: Options of tasks and texts, with their defaults.
_WITHOUT_EFFECT = {"tasks": None, "corpus": None, "sequences": None, "include_path": None, "limit": None}


class LabelledModel(NamedTuple):
    """A model, its examples, and the store that a command line names."""

    config: LabelledConfig
    texts: LabelledTexts
    store: Store
    context: RunContext


def add_labelled(parser: argparse.ArgumentParser) -> None:
    """Add the options of labelled examples."""
    data_options.add_data(parser)
    parser.add_argument(
        "--metric",
        choices=("accuracy", "bleu", "loss"),
        help="metric on --data (default: accuracy for classifiers, bleu for encoder-decoders)",
    )


def check_labelled(options: argparse.Namespace, others: Mapping[str, Any]) -> None:
    """Raise UsageError if options do not go together.

    Args:
        others: Further options without effect on examples, with their defaults.
    """
    data_options.check_data(options, {**_WITHOUT_EFFECT, **others})
    if options.data is None and options.metric is not None:
        raise arguments.UsageError("--metric needs --data: name a file of labelled examples")


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[LabelledModel]:
    """Read the examples and open the model's replicas while the context is open."""
    from headscan.pipelines.ablate.labelled_arms import LabelledConfig
    from headscan.pipelines.ablate.labelled_texts import read_labelled
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.runs.run_records import RunContext

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    config = LabelledConfig(spec, data_options.data_spec(options), options.metric, options.max_tokens)
    identity = identify(spec)
    texts = read_labelled(config.data, spec, identity, options.max_tokens)
    config.metric_of(texts)
    store = shared.open_store(options, writes=True)
    place = device_options.placement(options, spec, tokens=texts.longest)
    with device_options.open_replicas(options, spec, place.placement) as pool:
        yield LabelledModel(replace(config, batch_tokens=place.batch_tokens), texts, store, RunContext(identity, pool))
