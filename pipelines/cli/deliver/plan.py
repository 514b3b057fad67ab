"""write head_plan.json: which KV heads keep the whole cache, and which only a window

    headscan plan --store s.duckdb --window-share 0.5

`headscan export` writes the plan for KV-cache tools.
"""

from __future__ import annotations

import argparse

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.runs.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    parser.add_argument("--run", help="first characters of a scan's id (default: the newest finished scan)")
    parser.add_argument(
        "--window-share",
        type=arguments.number(0, 1, above=True),
        default=0.5,
        help="share of KV heads that keep only a window (default: 0.5)",
    )
    parser.add_argument(
        "--sink", type=arguments.count, default=4, help="number of first tokens that a window head keeps (default: 4)"
    )
    parser.add_argument(
        "--recent",
        type=arguments.count,
        default=256,
        help="number of last tokens that a window head keeps (default: 256)",
    )
    parser.add_argument("--out", default="head_plan.json", help="output file (default: head_plan.json)")


def run(options: argparse.Namespace) -> None:
    from headscan.analysis.plans.make_plan import make_plan

    store = shared.open_store(options)
    run_id = store.resolve_run(options.run, "scan")["run_id"]
    plan = make_plan(store, run_id, window_share=options.window_share, sink=options.sink, recent=options.recent)
    plan.save(options.out)
    for line in plan.summary():
        show(line)
    print(f"written to {options.out}")
