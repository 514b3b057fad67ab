"""list the runs of a store, their progress, and the arms of its evaluations

    headscan status --store s.duckdb

A run that is still working shows how far it is.
"""

from __future__ import annotations

import argparse

from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.runs.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)


def run(options: argparse.Namespace) -> None:
    from headscan.analysis.store.processes import host_of, is_visible
    from headscan.analysis.store.records import SHARDED_KINDS
    from headscan.pipelines.runs.text_tables import text_table

    store = shared.open_store(options)
    runs = store.runs()
    if not runs:
        show(f"{options.store} holds no runs")
        return
    rows = []
    for run in runs:
        sharded = run["kind"] in SHARDED_KINDS
        total = "?" if run["total_shards"] is None else run["total_shards"]
        status = run["status"]
        if status == "running" and not is_visible(run["writer"]):
            status = f"running on {host_of(run['writer'])}, when last heard of"
        rows.append(
            {
                "run": run["run_id"],
                "kind": run["kind"],
                "model": run["model"],
                "corpus or tasks": run["corpus"],
                "status": status,
                "shards": f"{run['finished_shards']}/{total}" if sharded else "",
                "started": f"{run['started_at']:%Y-%m-%d %H:%M}",
                "last shard": f"{run['last_written']:%Y-%m-%d %H:%M}" if run["last_written"] else "",
            }
        )
    print(text_table(rows))
    arms = store.query(
        "select run_id as run, arm, task, questions, accuracy, standard_error from all_arm_summary where task = '(all)'"
        " order by all"
    ).to_pylist()
    if arms:
        print()
        print(text_table(arms))
