"""The published JSON schema of plan files, and files of the version before."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headscan.analysis.plans import (
    HeadPlan,
    KVBytes,
    PlanError,
    WindowHeads,
    allocate,
    load_plan,
    make_plan,
    plan_schema,
    random_plan,
    read_pattern,
    write_pattern,
)
from tests.analysis.plan_fixtures import RECENT, SINK, masses, site, write_scan
from tests.analysis.plans.test_plan_methods import CALIBRATION, measured, write_probe
from tests.sources import ROOT

GRID = [site(0, 4, 2), site(1, 4, 2)]
TOKENS = [64, 200]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[HeadPlan]:
    """A plan of every method, budget and action."""
    path = tmp_path_factory.mktemp("schema")
    need = np.array([[0.9, 0.0, 0.1, 0.2], [0.3, 0.4, 0.01, 0.0]])
    store, run_id = write_scan(path / "s.duckdb", GRID, masses(need, TOKENS), TOKENS)
    plan = make_plan(
        store, run_id, window_share=0.5, sink=SINK, recent=RECENT, removable={(0, 0): "verdict"}, validation={"a": [1]}
    )
    uniform = make_plan(store, run_id, window_share=0.5, sink=SINK, recent=RECENT)
    write_pattern(uniform, path)
    probe = write_probe(path, retrieval_score=[[0.5, 0.0, 0.1, 0.0], [0.0, 0.3, 0.2, 0.1]])
    measured_plan = allocate(measured([[0.1, 0.2], [0.3, 0.4], [np.nan] * 2], None), WindowHeads(1), sink=4, recent=60)
    assert measured_plan.calibration == CALIBRATION
    return [
        plan,
        uniform,
        measured_plan,
        make_plan(store, run_id, method="imported", pattern=read_pattern(path)),
        make_plan(probe, None, method="retrieval_score", budget=KVBytes(10**6, 4096)),
        random_plan(plan, 0),
    ]


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = json.loads((ROOT / "docs" / "head_plan.schema.json").read_text(encoding="utf-8"))
    assert committed == plan_schema(), "write json.dumps(plan_schema(), indent=2) to docs/head_plan.schema.json"
    jsonschema.Draft202012Validator.check_schema(committed)


def test_saved_plans_follow_the_schema_and_survive_their_files(plans: list[HeadPlan], tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(plan_schema())
    for number, plan in enumerate(plans):
        path = plan.save(tmp_path / f"{number}.json")
        validator.validate(json.loads(path.read_text()))
        assert load_plan(path) == plan
    assert {plan.method for plan in plans} == {"measured", "distant_mass", "retrieval_score", "imported", "random"}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "other"},
        {"method": "guess"},
        {"calibration": {"kind": "scan"}},
        {"calibration": {"kind": "none"}},
        {"budget": None},
        {"heads": [{"layer": 0}]},
        {"extra": 1},
        {"score": 1},
    ],
)
def test_other_files_fail_the_schema_and_the_reader(
    plans: list[HeadPlan], tmp_path: Path, change: dict[str, Any]
) -> None:
    data = json.loads(plans[0].to_json()) | change
    assert not jsonschema.Draft202012Validator(plan_schema()).is_valid(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    if "version" not in change:
        with pytest.raises(PlanError):
            load_plan(path)


def version_2(plan: HeadPlan) -> dict[str, Any]:
    """A plan as version 2 wrote it."""
    data = json.loads(plan.to_json()) | {"version": 2}
    del (
        data["model"]["max_tokens"],
        data["method"],
        data["calibration"]["kind"],
        data["budget"]["request"],
        data["budget"]["dropped_heads"],
    )
    for head in data["heads"]:
        for name in ("retrieval_score", "induction_score", "damage", "pattern", "removable"):
            del head["evidence"][name]
    for head in data["query_heads"]:
        del head["retrieval_score"], head["induction_score"]
    return data


def test_version_2_is_read_as_distant_mass(plans: list[HeadPlan], tmp_path: Path) -> None:
    plan = plans[1]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(version_2(plan)))
    request = WindowHeads(plan.budget.window_heads)
    assert load_plan(path) == dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, request=request))


@pytest.mark.parametrize(
    "change", [{"heads": 1}, {"heads": [1]}, {"budget": 1}, {"query_heads": [None]}, {"calibration": None}]
)
def test_damaged_files_of_version_2_are_refused(plans: list[HeadPlan], tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(version_2(plans[1]) | change))
    with pytest.raises(PlanError, match=r"plan\."):
        load_plan(path)


def test_a_window_of_nothing_in_a_file_is_refused(plans: list[HeadPlan], tmp_path: Path) -> None:
    for widths in ({"sink": 0, "recent": 0}, {"sink": 4, "recent": 0}, {"sink": -1, "recent": 5}):
        data = json.loads(plans[1].to_json())
        next(head for head in data["heads"] if head["action"] == "window").update(widths)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError, match="keeps at least the last token"):
            load_plan(path)


def test_version_3_does_not_know_the_positions(plans: list[HeadPlan], tmp_path: Path) -> None:
    data = json.loads(plans[0].to_json()) | {"version": 3}
    del data["model"]["max_tokens"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert load_plan(path) == replace(plans[0], model=replace(plans[0].model, max_tokens=None))
