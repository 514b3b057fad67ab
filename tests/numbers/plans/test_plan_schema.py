"""The published JSON schema of plan files, and files that do not follow it."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headscan.plans import (
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
from tests.numbers.plan_fixtures import RECENT, SINK, masses, site, write_scan
from tests.numbers.plans.test_plan_methods import CALIBRATION, measured, write_probe
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
        store, run_id, window_share=0.5, sink=SINK, recent=RECENT, dropped={(0, 0): "verdict"}, validation={"a": [1]}
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
        path = plan.save(tmp_path / f"{number}" / "head_plan.json")
        data = json.loads(path.read_text())
        validator.validate(data)
        assert load_plan(path) == plan
        assert (data["format"], data["version"]) == ("headscan-head-plan", 5)
        assert [file.name for file in path.parent.iterdir()] == ["head_plan.json"]
    assert {plan.method for plan in plans} == {"measured", "distant_mass", "retrieval_score", "imported", "random"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, r"version 1 .* Make the plan again"),
        ({"version": 4}, r"version 4 .* Make the plan again"),
        ({"format": "other"}, "is not a head plan"),
        ({"method": "guess"}, r"plan\.method"),
        ({"calibration": {"kind": "scan"}}, r"plan\."),
        ({"calibration": {"kind": "none"}}, r"plan\."),
        ({"calibration": None}, r"plan\."),
        ({"budget": None}, r"plan\.budget is None"),
        ({"budget": 1}, r"plan\."),
        ({"heads": [{"layer": 0}]}, r"plan\."),
        ({"heads": [1]}, r"plan\."),
        ({"heads": 1}, r"plan\."),
        ({"query_heads": [None]}, r"plan\."),
        ({"granularity": "query_head"}, "granularity"),
        ({"extra": 1}, "extra"),
        ({"score": 1}, r"plan\.score"),
    ],
)
def test_other_files_fail_the_schema_and_the_reader(
    plans: list[HeadPlan], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = json.loads(plans[0].to_json()) | change
    assert not jsonschema.Draft202012Validator(plan_schema()).is_valid(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_a_window_of_nothing_in_a_file_is_refused(plans: list[HeadPlan], tmp_path: Path) -> None:
    for window, message in (
        ([0, 0], "only a head with a verdict"),
        ([4, 0], r"heads\[1\]\.window is a list of 2 \(limit null, or numbers of first and last tokens such as"),
        ([-1, 5], "window is a list of 2 "),
        ([4, 2**60], "window is a list of 2 "),
        ([4, 16.0], "window is a list of 2 "),
        ([4, True], "window is a list of 2 "),
        ([4, 16, 16], "window is a list of 3 "),
        (16, "window is 16 "),
    ):
        data = json.loads(plans[1].to_json())
        data["heads"][1]["window"] = window
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError, match=message):
            load_plan(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("model.layers.0.num_key_value_heads", 10**9, "1000000002 KV heads .*num_key_value_heads of layer 0 is 10"),
        ("model.layers.0.num_key_value_heads", 0, r"plan\.model\.layers\[0\]\.num_key_value_heads is 0 "),
        ("model.layers.1.kv_bytes", -1, r"plan\.model\.layers\[1\]\.kv_bytes is -1 "),
        ("model.layers.1.layer", 0, "layer 0 is listed after layer 0 of 2 layers"),
        ("model.layers.1.layer", 2, "layer 2 is listed after layer 0 of 2 layers"),
        ("model.layers", [], r"plan\.model\.layers is a list of 0 \(limit at least 1 item"),
        ("model.num_layers", 10**9, "num_layers is 1000000000"),
        ("model.num_layers", 0, "num_layers is 0"),
        ("model.max_tokens", -5, "max_tokens is -5"),
        ("model.num_layers", 10**400, r"plan\.model\.num_layers is an integer of 1329 bits"),
        ("heads.1.score", 10**400, r"plan\.heads\[1\]\.score is an integer of 1329 bits"),
        ("heads.1.score", float("nan"), r"plan\.heads\[1\]\.score is nan"),
        ("query_heads.1.entropy", float("inf"), r"plan\.query_heads\[1\]\.entropy is inf"),
        ("heads.1.kv_head", [[]] * 10**5, r"plan\.heads\[1\]\.kv_head is a list"),
        ("version", 10**400, "has version an integer of 1329 bits"),
        ("validation", {"a": {"b": [1, 10**400]}}, r"plan\.validation\['a'\]\['b'\]\[1\] is an integer of 1329 bits"),
        ("validation", {"a": float("-inf")}, r"plan\.validation\['a'\] is -inf"),
        ("budget.lengths", [], r"plan\.budget\.lengths is a list of 0 \(limit at least 1 item"),
        ("budget.lengths.0.saved_share", 2, r"plan\.budget\.lengths\[0\]\.saved_share is 2 "),
        ("budget.lengths.0.tokens", -4096, r"plan\.budget\.lengths\[0\]\.tokens is -4096 "),
        ("budget.window_heads", 10**9, "window_heads of the budget is 1000000000, but the entries have"),
        ("budget.window_share", 1.5, r"plan\.budget\.window_share is 1\.5 "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_out_of_range_are_named_before_they_cost_memory(
    plans: list[HeadPlan], tmp_path: Path, place: str, value: Any, message: str
) -> None:
    data = json.loads(plans[0].to_json())
    *within, last = place.split(".")
    record: Any = data
    for name in within:
        record = record[int(name) if isinstance(record, list) else name]
    record[int(last) if isinstance(record, list) else last] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    tracemalloc.start()
    try:  # the largest file has 300 kB
        with pytest.raises(PlanError, match=message):
            load_plan(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_deeply_nested_plans_are_refused(plans: list[HeadPlan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for levels in (40, 500, 10**5):
        nested = "[" * levels + "]" * levels
        path.write_text(plans[0].to_json().replace('"validation": {"a": [1]}', f'"validation": {{"a": {nested}}}'))
        with pytest.raises(PlanError, match="nests its values too deeply"):
            load_plan(path)


def test_hostile_names_stay_on_one_line(plans: list[HeadPlan], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = json.loads(plans[0].to_json())
    for change, message in (
        ({"a\nb\x1b[2J": 1}, r"plan lacks or should not have 'a\\nb\\x1b"),
        ({str(i): 1 for i in range(10**5)}, "plan lacks or should not have '0', '1', '10'"),
        ({"calibration": {"kind": "a\nb"}}, r"plan\.calibration is a dict of 1 \(limit a known kind\)"),
        ({"score": ["\n"]}, r"plan\.score is a list of 1 \(limit a valid string\)"),
        ({"method": "\n" * 10**6}, r"plan\.method is '(\\n){40}' \(limit 'measured', "),
        ({"heads": [None] * 10**6}, r"plan\.heads\[0\] is None "),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(PlanError, match=message) as caught:
            load_plan(path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_only_regular_files_of_json_are_read(plans: list[HeadPlan], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(PlanError, match="is not a regular file"):
            load_plan(path)
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(PlanError, match="cannot read"):
            load_plan(path)
    for text, message in (
        ("hello", "is not JSON"),
        (json.dumps(json.loads(plans[1].to_json()) | {"heads": []}), "0 entries for the 4 KV heads of tiny"),
    ):
        (tmp_path / "text.json").write_text(text)
        with pytest.raises(PlanError, match=message):
            load_plan(tmp_path / "text.json")


def test_a_pattern_of_many_layers_costs_no_memory(plans: list[HeadPlan], tmp_path: Path) -> None:
    plan = replace(plans[1], model=replace(plans[1].model, num_layers=10**5))
    with pytest.raises(PlanError, match="2 of the 100000 layers of"):
        write_pattern(plan, tmp_path)
