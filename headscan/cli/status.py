"""The verb status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscan.cli.verb_base import StoreVerb
from headscan.steps.results import Json, Result
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Status(StoreVerb):
    """list the runs of a store, their progress, and the arms of its evaluations

        headscan status --store s.duckdb

    A run in progress shows how many of its shards or arms are finished.
    """

    json: Json = False

    def run(self) -> Result:
        store = self.store.open()
        runs = [_run_row(store, run) for run in store.runs()]
        arms = store.query(
            "select run_id as run, arm, task, questions, accuracy, standard_error from all_arm_summary where task ="
            " '(all)' order by all"
        ).to_pylist()
        path = self.store.path
        return Result(runs, lambda: _status_text(path, runs, arms), {"store": path, "arms": arms})


def _run_row(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a run; counts that its kind lacks are None."""
    from headscan.store.provenance import host_of, is_visible
    from headscan.store.records import SHARDED_KINDS

    status = run["status"]
    if status == "running" and not is_visible(run["writer"]):
        status = f"running on {host_of(run['writer'])}, when last heard of"
    sharded, has_arms = run["kind"] in SHARDED_KINDS, run["kind"] in ("evaluate", "ablate", "recall")
    units = None
    if run["kind"] in ("plan", "prune"):
        units = store.query("select count(*) from units where run_id = ?", [run["run_id"]])[0][0].as_py()
    return {
        "run_id": run["run_id"],
        "kind": run["kind"],
        "model": run["model"],
        "corpus": run["corpus"],
        "status": status,
        "finished_shards": run["finished_shards"] if sharded else None,
        "total_shards": run["total_shards"] if sharded else None,
        **(_arm_counts(store, run) if has_arms else dict.fromkeys(_ARM_COUNTS)),
        "measured_units": units,
        "started_at": run["started_at"],
        "last_written": run["last_written"],
    }


_ARM_COUNTS = ("arms", "finished_arms", "answered_requests", "open_requests")


def _arm_counts(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arms of a run, and the requests of the unfinished ones; None if their number is unknown."""
    [counts] = store.query(
        "select count(*) as arms, count(*) filter (status = 'finished') as finished_arms, (select"
        " coalesce(sum(len(numbers)), 0)::bigint // 3 from units where run_id = $1) as answered_requests from arms"
        " where run_id = $1",
        [run["run_id"]],
    ).to_pylist()
    each, left = run["config"].get("requests"), counts["arms"] - counts["finished_arms"]
    return {**counts, "open_requests": None if each is None else each * left}


def _status_text(store: str, runs: Sequence[Mapping[str, Any]], arms: Sequence[Mapping[str, Any]]) -> str:
    from headscan.text_tables import table_cells, text_table

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
    """Return the finished shards or arms of a run, of all, or its measured units; ``?`` until the corpus is read."""
    if row["measured_units"] is not None:
        return counted(row["measured_units"], "unit")
    if row["finished_shards"] is not None:
        total = row["total_shards"]
        return f"{row['finished_shards']}/{'? shards' if total is None else counted(total, 'shard')}"
    if row["arms"] is None:
        return ""
    text = f"{row['finished_arms']}/{counted(row['arms'], 'arm')}"
    if row["finished_arms"] == row["arms"]:
        return text
    total = "" if row["open_requests"] is None else f"/{row['open_requests']:,}"
    return f"{text}, {row['answered_requests']:,}{total} requests of the others"
