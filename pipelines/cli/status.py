"""what a store holds: its runs, how far they are, and its evaluations"""

from __future__ import annotations

import argparse

from pipelines.cli import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)


def run(options: argparse.Namespace) -> None:
    from pipelines.cli.tables import text_table

    store = shared.open_store(options)
    runs = store.runs()
    if not runs:
        print(f"{options.store} holds no runs")
        return
    rows = []
    for run in runs:
        scan = run["kind"] in ("scan", "recording")
        total = "?" if run["total_shards"] is None else run["total_shards"]
        rows.append(
            {
                "run": run["run_id"],
                "kind": run["kind"],
                "model": run["model"],
                "corpus or tasks": run["corpus"],
                "status": run["status"],
                "shards": f"{run['finished_shards']}/{total}" if scan else "",
                "started": f"{run['started_at']:%Y-%m-%d %H:%M}",
            }
        )
    print(text_table(rows))
    arms = store.query(
        "select run_id as run, arm, task, questions, accuracy, standard_error from arm_summary where task = '(all)'"
        " order by all"
    ).to_pylist()
    if arms:
        print()
        print(text_table(arms))
