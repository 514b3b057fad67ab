"""Plans of pruned models in which query heads read KV heads in groups of different sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscan.analysis.plans.format.plan_records import PlanError
from headscan.analysis.plans.format.planned_model import planned_model
from headscan.analysis.plans.methods.scan_scores import distant_mass_scores
from tests.analysis.plan_fixtures import everything, site, write_scan

GRID = [site(0, 4, 2), site(1, 4, 2, kv_index=[0, 1, 1, 1])]


def test_methods_that_map_query_heads_are_refused(tmp_path: Path) -> None:
    store, run_id = write_scan(tmp_path / "s.duckdb", GRID, everything(2, 4, [64, 64]), [64, 64])
    with pytest.raises(PlanError, match=r"layer 1 of tiny.*measured or random"):
        distant_mass_scores(store, run_id)
    model, recorded = planned_model(store.resolve_run(run_id, "scan"), equal_groups=False)
    assert recorded and [layer.num_key_value_heads for layer in model.layers] == [2, 2]
