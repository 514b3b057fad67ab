"""score the behaviours of every head: induction, duplicate and previous tokens, retrieval from long texts

    headscan probe MODEL --store s.duckdb
    headscan probe MODEL --behaviours retrieval_score --lengths 512,2048 --depths 0,0.5,1

Heads are scored on sequences made for the behaviour: repeated random tokens, and sentences hidden in a long text. The
same command again reads the scores from the store.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from headscan.catalog import BEHAVIOURS
from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store

#: Heads shown for each behaviour.
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_store(parser)
    add_json(parser)
    device_options.add_devices(parser)
    shared.add_resume(parser)
    group = parser.add_argument_group("behaviours")
    group.add_argument(
        "--behaviours",
        type=arguments.names("behaviour", BEHAVIOURS),
        default=(),
        help=f"comma-separated behaviours: {', '.join(BEHAVIOURS)} (default: all)",
    )
    group.add_argument(
        "--seed", type=arguments.whole(0, 2**63 - 1), default=0, help="seed of the random tokens (default: 0)"
    )
    needle = parser.add_argument_group("retrieval_score")
    needle.add_argument(
        "--lengths",
        type=arguments.listed(arguments.count),
        nargs="+",
        action=arguments.Flat,
        help="comma-separated prompt lengths in tokens (default: 512,2048, or the model's context)",
    )
    needle.add_argument(
        "--depths",
        type=arguments.listed(arguments.number(0, 1)),
        nargs="+",
        action=arguments.Flat,
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="comma-separated positions of the sentence, from 0 (beginning) to 1 (end) (default: 0,0.25,0.5,0.75,1)",
    )
    needle.add_argument(
        "--corpus",
        default="python-stdlib",
        help="text around the sentence: file, folder, data set on the hub, or built-in corpus (default: python-stdlib)",
    )
    shared.add_corpus(needle)


def run(options: argparse.Namespace) -> Result:
    from headscan.measure.behaviour_probes import BehaviourProbe
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.scan.run_probe import ProbeConfig, default_lengths, probe

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec, need_tokenizer=False)
    lengths = options.lengths or default_lengths(identity)
    config = ProbeConfig(
        model=spec,
        behaviours=options.behaviours,
        corpus=shared.corpus_spec(options),
        settings=BehaviourProbe(seed=options.seed, lengths=tuple(lengths), depths=tuple(options.depths)),
    )
    store = shared.open_store(options, writes=True)
    plan = device_options.placement(options, spec, tokens=max(lengths))
    config = replace(config, batch_tokens=plan.batch_tokens)
    result = probe(config, device_options.run_options(options, store, spec, plan.placement, identity))
    return _result(store, result.run_id, options.store, already_done=result.already_done)


def _result(store: Store, run_id: str, path: str, *, already_done: bool) -> Result:
    """Return the heads of each behaviour, and how many exceed the source's threshold.

    The text shows the strongest heads only.
    """
    from headscan.analysis.store.behaviour_rows import behaving_heads, measured_behaviours
    from headscan.pipelines.runs.text_tables import text_table

    ranked = {name: behaving_heads(store, run_id, name) for name in measured_behaviours(store, run_id)}
    rows = [
        {"behaviour": name, "rank": place, **asdict(head)}
        for name, heads in ranked.items()
        for place, head in enumerate(heads, 1)
    ]
    above = {
        name: sum(head.value > declared for head in heads)
        for name, heads in ranked.items()
        if (declared := BEHAVIOURS[name].threshold) is not None
    }

    def text() -> str:
        done = f"is complete in {path}: nothing to do" if already_done else f"in {path}"
        counts = [
            f"{count} of {len(ranked[name])} heads have a {name} above {BEHAVIOURS[name].threshold:g}"
            f" ({BEHAVIOURS[name].source})"
            for name, count in above.items()
        ]
        shown = text_table([row for row in rows if row["rank"] <= _SHOWN])
        return "\n".join([f"run {run_id} {done}", shown, *counts])

    return Result(rows, text, {"run_id": run_id, "store": path, "above_threshold": above})
