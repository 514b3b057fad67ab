"""list the runs of a store, their progress, and the arms of its evaluations

    headscan status --store s.duckdb

A run that is still working shows how far it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.runs.terminal import show

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store


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
    arms_done = {run["run_id"]: _arms(store, run) for run in runs if run["kind"] == "evaluate"}
    rows = []
    for run in runs:
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
                "progress": _shards(run) if run["kind"] in SHARDED_KINDS else arms_done.get(run["run_id"], ""),
                "started": f"{run['started_at']:%Y-%m-%d %H:%M}",
                "last written": f"{run['last_written']:%Y-%m-%d %H:%M}" if run["last_written"] else "",
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


def _shards(run: Mapping[str, Any]) -> str:
    """Return the finished shards of a run, of all; ``?`` until the corpus is read."""
    return f"{run['finished_shards']}/{'?' if run['total_shards'] is None else run['total_shards']} shards"


def _arms(store: Store, run: Mapping[str, Any]) -> str:
    """Return the finished arms of an evaluation, and the answered requests of the unfinished ones."""
    [found] = store.query(
        "select count(*) as arms, count(*) filter (status = 'finished') as finished, (select count(*) from responses"
        " join arms using (arm_id) where run_id = $1) as answered from arms where run_id = $1",
        [run["run_id"]],
    ).to_pylist()
    text = f"{found['finished']}/{found['arms']} arms"
    if found["finished"] == found["arms"]:
        return text
    each = run["config"].get("requests")
    total = "" if each is None else f"/{each * (found['arms'] - found['finished']):,}"
    return f"{text}, {found['answered']:,}{total} requests of the others"
