"""write one self-contained HTML page: the answers, then a map of every head, and the evidence

    headscan report --store s.duckdb --out report.html
    headscan report --run 3f9a --compare 77c0 --plan head_plan.json

The page opens with how many heads are inactive, how many can go at what cost, and how much KV cache can go. It names
missing answers with the commands that give them. It is one file and needs no network.
"""

from __future__ import annotations

import argparse

from headscan.catalog import SCORES, STATISTICS
from headscan.pipelines.cli.shared import arguments, task_options
from headscan.pipelines.cli.shared import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    parser.add_argument("--run", help="first characters of a scan's id (default: the newest finished scan)")
    parser.add_argument(
        "--evaluation",
        help="first characters of an evaluation's id (default: the newest of the same model with a finished arm)",
    )
    parser.add_argument("--plan", help="head_plan.json to include (default: none)")
    known = dict.fromkeys([*SCORES, *STATISTICS])
    parser.add_argument(
        "--scores",
        type=arguments.names("score", known),
        help="comma-separated scores and statistics, the first of which the map shows first (default: output_norm_ln)",
    )
    parser.add_argument(
        "--compare",
        help="first characters of another scan's id, or `none` (default: the newest other scan with the same heads)",
    )
    task_options.add_confirm(parser)
    parser.add_argument("--out", default="report.html", help="output file (default: report.html)")


def run(options: argparse.Namespace) -> None:
    from headscan.analysis.plans import load_plan
    from headscan.analysis.provenance import same_model
    from headscan.analysis.report.write_report import comparable_scan, write_report
    from headscan.analysis.verdicts.finished_arms import can_be_judged

    store = shared.open_store(options)
    scan_run = store.resolve_run(options.run, "scan")
    shared.say_run(scan_run)
    if options.evaluation:
        evaluation = store.resolve_run(options.evaluation, "evaluate")["run_id"]
    else:
        ours = [run["run_id"] for run in store.runs("evaluate") if same_model(run, scan_run)]
        evaluation = next((run_id for run_id in ours if can_be_judged(store, run_id)), None)
    if options.compare:
        compared = None if options.compare == "none" else options.compare
    else:
        compared = comparable_scan(store, scan_run)
    path = write_report(
        store,
        options.out,
        scan_run=scan_run["run_id"],
        evaluate_run=evaluation,
        compare_run=compared,
        plan=load_plan(options.plan) if options.plan else None,
        plan_file=options.plan,
        scores=options.scores or (),
        confirm=options.confirm,
    )
    print(path)
