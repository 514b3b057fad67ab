"""list the runs of a store, their progress, and the arms of its evaluations

    headscan status --store s.duckdb

A run that is still working shows how far it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> Result:
    store = shared.open_store(options)
    runs = [_run_row(store, run) for run in store.runs()]
    arms = store.query(
        "select run_id as run, arm, task, questions, accuracy, standard_error from all_arm_summary where task = '(all)'"
        " order by all"
    ).to_pylist()
    return Result(runs, lambda: _text(options.store, runs, arms), {"store": options.store, "arms": arms})


def _run_row(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a run; counts that its kind lacks are None."""
    from headscan.analysis.store.processes import host_of, is_visible
    from headscan.analysis.store.records import SHARDED_KINDS

    status = run["status"]
    if status == "running" and not is_visible(run["writer"]):
        status = f"running on {host_of(run['writer'])}, when last heard of"
    sharded, has_arms = run["kind"] in SHARDED_KINDS, run["kind"] in ("evaluate", "ablate")
    return {
        "run_id": run["run_id"],
        "kind": run["kind"],
        "model": run["model"],
        "corpus": run["corpus"],
        "status": status,
        "finished_shards": run["finished_shards"] if sharded else None,
        "total_shards": run["total_shards"] if sharded else None,
        **(_arm_counts(store, run) if has_arms else dict.fromkeys(_ARM_COUNTS)),
        "started_at": run["started_at"],
        "last_written": run["last_written"],
    }


_ARM_COUNTS = ("arms", "finished_arms", "answered_requests", "open_requests")


def _arm_counts(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arms of a run, and the requests of the unfinished ones; None if their number is unknown."""
    [found] = store.query(
        "select count(*) as arms, count(*) filter (status = 'finished') as finished, (select count(*) from responses"
        " join arms using (arm_id) where run_id = $1) as answered from arms where run_id = $1",
        [run["run_id"]],
    ).to_pylist()
    each = run["config"].get("requests")
    left = found["arms"] - found["finished"]
    return dict(
        zip(
            _ARM_COUNTS,
            (found["arms"], found["finished"], found["answered"], None if each is None else each * left),
            strict=True,
        )
    )


def _text(store: str, runs: Sequence[Mapping[str, Any]], arms: Sequence[Mapping[str, Any]]) -> str:
    from headscan.pipelines.runs.text_tables import table_cells, text_table

    if not runs:
        return f"{store} holds no runs"
    columns: dict[str, str | Callable[[Mapping[str, Any]], Any]] = {
        "run": "run_id",
        "kind": "kind",
        "model": "model",
        "corpus or tasks": "corpus",
        "status": "status",
        "progress": _progress,
        "started": lambda row: f"{row['started_at']:%Y-%m-%d %H:%M}",
        "last written": lambda row: f"{row['last_written']:%Y-%m-%d %H:%M}" if row["last_written"] else "",
    }
    tables = [text_table(table_cells(runs, columns))]
    return "\n\n".join([*tables, text_table(arms)] if arms else tables)


def _progress(row: Mapping[str, Any]) -> str:
    """Return the finished shards or arms of a run, of all; ``?`` until the corpus is read."""
    if row["finished_shards"] is not None:
        return f"{row['finished_shards']}/{'?' if row['total_shards'] is None else row['total_shards']} shards"
    if row["arms"] is None:
        return ""
    text = f"{row['finished_arms']}/{row['arms']} arms"
    if row["finished_arms"] == row["arms"]:
        return text
    total = "" if row["open_requests"] is None else f"/{row['open_requests']:,}"
    return f"{text}, {row['answered_requests']:,}{total} requests of the others"
