"""fit gates on the heads of a frozen model: which heads may close

    headscan gates MODEL --corpus texts/ --share 0.4 --store s.duckdb
    headscan gates MODEL --corpus texts/ --two-sided
    headscan rank --by gate --store s.duckdb

The closed heads become a mask for `headscan prune --mask`, and a list for `headscan evaluate --heads`. Two-sided
fits classify facilitating, interfering and irrelevant heads. The same command again resumes an interrupted run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--corpus",
        help="texts: file, folder, data set on the hub, or a built-in corpus (default: required, except for `demo`: "
        f"{shared.DEMO_CORPUS})",
    )
    shared.add_corpus(texts)
    texts.add_argument("--sequences", type=arguments.count, default=256, help="number of texts (default: 256)")
    texts.add_argument(
        "--max-tokens", type=arguments.whole(16), default=128, help="longest text in tokens (default: 128)"
    )
    fit = parser.add_argument_group("fit")
    fit.add_argument("--share", type=arguments.share, default=0.4, help="share of heads to close (default: 0.4)")
    fit.add_argument(
        "--two-sided",
        action="store_true",
        help="second fit that opens gates with the same penalty, and the class of every head",
    )
    fit.add_argument(
        "--objective",
        choices=("loss", "divergence"),
        default="loss",
        help="loss: that of the texts; divergence: from the predictions without gates (default: loss)",
    )
    fit.add_argument(
        "--steps",
        type=arguments.count,
        default=120,
        help="number of steps of each fit; up to four times as many follow until the share is closed (default: 120)",
    )
    fit.add_argument(
        "--step-tokens", type=arguments.count, default=1024, help="tokens of a step, with padding (default: 1024)"
    )
    fit.add_argument("--seed", type=arguments.whole(0), default=0, help="seed of the noise (default: 0)")
    fit.add_argument("--site", default="self", help="attention of the layer: self, encoder or cross (default: self)")


def run(options: argparse.Namespace) -> Result:
    from headscan.gates.gate_config import GateConfig
    from headscan.pipelines.gates.run_gates import GatesConfig, run_gates
    from headscan.pipelines.runs.identity import identify

    shared.require_corpus(options)
    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    config = GatesConfig(
        model=spec,
        corpus=shared.corpus_spec(options),
        fit=GateConfig(
            share=options.share,
            objective=options.objective,
            steps=options.steps,
            batch_tokens=options.step_tokens,
            seed=options.seed,
        ),
        two_sided=options.two_sided,
        site=options.site,
        sequences=options.sequences,
        max_tokens=min(options.max_tokens, identity.max_tokens or options.max_tokens),
    )
    store = shared.open_store(options, writes=True)
    place = device_options.placement(options, spec, tokens=config.max_tokens).placement
    result = run_gates(config, device_options.run_options(options, store, spec, place, identity))
    if result.already_done:
        shared.say(f"run {result.run_id} is complete in {options.store}: nothing to do")
    return _result(store, result.run_id, options, result.mask)


def _result(store: Store, run_id: str, options: argparse.Namespace, mask: str) -> Result:
    """Return the gates, the most closed first, and the number of heads of each class."""
    from headscan.analysis.heads.importance_ranking import gated_heads
    from headscan.pipelines.runs.text_tables import text_table

    heads = gated_heads(store, run_id, site=options.site)
    closed = sorted((head.layer, head.head) for head in heads if head.closed)
    still_open = sum(head.closed and head.gate > 0.5 for head in heads)
    classes = dict(Counter(head.head_class for head in heads if head.head_class is not None).most_common())

    def text() -> str:
        listed = ",".join(f"{layer}:{head}" for layer, head in closed)
        lines = [
            text_table([head.row() for head in heads]),
            f"{len(closed)} of {len(heads)} heads closed: --heads {listed}",
            f"{still_open} of these the fit keeps open (gate above 0.5): the share is not reached"
            if still_open
            else "",
            ", ".join(f"{count} {name}" for name, count in classes.items()),
            f"run {run_id} in {options.store}; prune with --mask {mask}",
        ]
        return "\n".join(filter(None, lines))

    facts = {
        "run_id": run_id,
        "store": options.store,
        "mask": mask,
        "closed": closed,
        "open": still_open,
        "classes": classes,
    }
    return Result(heads, text, facts)
