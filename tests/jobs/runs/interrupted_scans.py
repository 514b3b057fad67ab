"""A scan that stops after two of its five shards, and its resumption."""

from __future__ import annotations

from typing import Any

import pytest

from headscan.cluster.pool import InProcessPool, open_pool
from headscan.runs.run_context import Run
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_scan import MeasureShard, run_scan
from headscan.steps.scan import Scan
from headscan.store.store import Store
from tests.jobs.conftest import THREADS


class Interrupted(Exception):
    pass


class DyingPool(InProcessPool):
    """Measures two shards."""

    def map(self, task, items):  # type: ignore[no-untyped-def]
        for count, finished in enumerate(super().map(task, items)):
            if isinstance(getattr(task, "func", task), MeasureShard) and count == 2:
                raise Interrupted
            yield finished


def run(config: Scan, store: Store, **options: Any) -> CorpusRunResult:
    return run_scan(config, Run(config.model, store, lambda _: open_pool(config.model, THREADS), **options))


def interrupt(config: Scan, store: Store) -> str:
    """Leave a scan with two shards."""
    with pytest.raises(Interrupted):
        run_scan(config, Run(config.model, store, lambda _: DyingPool(config.model, THREADS)))
    (left,) = store.runs()
    assert (left["status"], left["finished_shards"], left["total_shards"]) == ("failed", 2, 5)
    return str(left["run_id"])
