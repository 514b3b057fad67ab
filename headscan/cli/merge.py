"""The verb merge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from headscan.cli.verb_base import StoreOptions
from headscan.options import Option
from headscan.steps.results import Json, Result
from headscan.text_tables import say


@dataclass(frozen=True, kw_only=True)
class Merge:
    """join the runs of several stores in one

        headscan merge part*.duckdb --into all.duckdb

    The stores of `headscan scan --part` become one scan, and runs of several machines come together. The same run in
    two stores is joined shard by shard and arm by arm; the same shard with other rows is an error. The stores stay as
    they are, and the same command again resumes an interrupted merge.
    """

    stores: Annotated[tuple[str, ...], Option("stores to read", flag="STORE", spaces=True, repeated=True)]
    into: Annotated[str, Option("store to write; its own runs stay")]
    json: Json = False
    resumes = True

    def run(self) -> Result:
        from headscan.store.merge_stores import merge_stores
        from headscan.text_tables import table_cells, text_table

        sources = [StoreOptions(path=path).open() for path in self.stores]
        into = StoreOptions(path=self.into).open(writes=True)
        runs = [asdict(run) for run in merge_stores(sources, into, say=say)]

        def text() -> str:
            if not runs:
                return "the stores hold no runs"
            return text_table(
                table_cells(
                    runs,
                    {
                        "run": "run_id",
                        "kind": "kind",
                        "model": "model",
                        "corpus or tasks": "corpus",
                        "status": "status",
                        "shards": lambda row: f"{row['shards']}/{row['total_shards'] or '?'}" if row["shards"] else "",
                        "new shards": "added_shards",
                        "new arms": "added_arms",
                    },
                )
            )

        return Result(runs, text, {"store": into.path})
