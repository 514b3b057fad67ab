"""Arms of a plan: names, shares and details, random plans of the same bytes, and plans of other models."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headscan.cluster.pool import InProcessPool
from headscan.engine.answer import need_headscan_kernels
from headscan.engine.arms import Arm
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import (
    KVBytes,
    PlanError,
    PlannedModel,
    WindowHeads,
    allocate,
    load_plan,
    planned_bytes,
    random_plan,
    random_scores,
)
from headscan.runs.run_context import ModelContext
from headscan.settings.evaluation_settings import PLAN_MODES
from headscan.steps.plan_arms import check_plan, plan_arms, window_notes
from headscan.store.records import ArmKind
from headscan.texts.token_requests import Request
from headscan.windows import KeptKeys
from tests.jobs.conftest import THREADS
from tests.jobs.steps.kv_plans import plan_for


@pytest.fixture(scope="module")
def lm(spec: ModelSpec) -> LoadedModel:
    return InProcessPool(spec, THREADS).one(_itself, None)


def _itself(lm: LoadedModel, item: object) -> LoadedModel:
    return lm


def kept_by(arm: Arm) -> KeptKeys:
    assert isinstance(arm.intervention, KvWindows | KvEviction)
    return arm.intervention.kept


def test_a_plan_is_an_arm_in_each_mode(model: PlannedModel) -> None:
    plan = replace(plan_for(model, [(0, 0), (2, 1)], dropped=[(1, 0)]), method="imported")
    forward, decode = plan_arms(plan, PLAN_MODES, 0)
    heads = len(plan.heads)
    label = rf"plan imported {100 * 3 / heads:g}% [0-9a-f]{{6}}, "
    assert re.fullmatch(label + "forward", forward.name) and re.fullmatch(label + "decode", decode.name)
    assert type(forward.intervention) is KvWindows and type(decode.intervention) is KvEviction
    for arm, mode in ((forward, "forward"), (decode, "decode")):
        assert (arm.kind, arm.share, arm.selection, arm.seed) == (ArmKind.PLAN, 3 / heads, mode, None)
        assert kept_by(arm) == plan.kept
        details = dict(arm.details)
        assert (details["mode"], details["method"]) == (mode, "imported")
        whole = [sum(layer.cache_bytes(row.tokens) for layer in model.layers) for row in plan.budget.lengths]
        expected = [
            (row.tokens, planned_bytes(plan, row.tokens) / all_bytes)
            for row, all_bytes in zip(plan.budget.lengths, whole, strict=True)
        ]
        assert list(details["kv_shares"]) == expected  # type: ignore[call-overload]


def test_seeds_are_random_plans_of_the_same_bytes(model: PlannedModel) -> None:
    plan = plan_for(model, [(0, 0), (2, 1)], dropped=[(1, 0)])
    arms = plan_arms(plan, ["decode"], 6)
    assert [arm.kind for arm in arms] == [ArmKind.PLAN, *[ArmKind.RANDOM_PLAN] * 6]
    assert [arm.seed for arm in arms] == [None, *range(6)]
    assert len({arm.name for arm in arms}) == 7 and len({kept_by(arm) for arm in arms}) > 3
    for arm in arms[1:]:
        drawn = random_plan(plan, arm.seed or 0)
        assert kept_by(arm) == drawn.kept
        assert planned_bytes(drawn, 4096) == planned_bytes(plan, 4096)
        assert (arm.share, arm.selection) == (arms[0].share, "decode")
        assert dict(arm.details)["kv_shares"] == dict(arms[0].details)["kv_shares"]
        assert sorted(window for _, _, window in kept_by(arm).windows) == sorted(
            window for _, _, window in kept_by(arms[0]).windows
        )


def test_plans_with_the_same_windows_share_their_random_plans(model: PlannedModel) -> None:
    """Twice the same control would count as two."""
    first, second = plan_for(model, [(0, 0), (2, 1)]), plan_for(model, [(1, 0), (1, 1)])
    wider = plan_for(model, [(0, 0), (2, 1)], recent=9)
    plans, randoms = [], []
    for plan in (first, second, wider):
        own, *others = plan_arms(plan, ["forward"], 4)
        plans.append(own.name)
        randoms.append({arm.name: arm.intervention for arm in others})
    assert len(set(plans)) == 3
    assert {name: kept_by(Arm(name, ArmKind.PLAN, each)) for name, each in randoms[0].items()} == {
        name: kept_by(Arm(name, ArmKind.PLAN, each)) for name, each in randoms[1].items()
    }
    assert not randoms[0].keys() & randoms[2].keys()


def test_plans_by_layer_have_controls_of_their_own(model: PlannedModel) -> None:
    """Random heads at the same bytes would be another question."""
    layers = [(1, kv_head) for kv_head in range(model.layers[1].num_key_value_heads)]
    by_head = plan_for(model, layers)
    by_layer = replace(by_head, granularity="layer")
    arms = [plan_arms(plan, ["forward"], 3) for plan in (by_head, by_layer)]
    assert not {arm.name for arm in arms[0]} & {arm.name for arm in arms[1]}
    assert kept_by(arms[0][0]) == kept_by(arms[1][0]) and "by layer" in arms[1][0].name
    assert ["granularity" in dict(arm.details) for each in arms for arm in each] == [False] * 4 + [True] * 4
    for arm in arms[1][1:]:
        windows = kept_by(arm).windows
        assert len(windows) == len(layers) and len({layer for layer, _, _ in windows}) == 1
        assert "by layer" in arm.name and dict(arm.details)["granularity"] == "layer"


def test_a_plan_of_another_model_is_refused(spec: ModelSpec, pool: InProcessPool, model: PlannedModel) -> None:
    context = ModelContext(spec, lambda _: pool)
    check_plan(plan_for(model, 2), context)
    for changes, what in (({"config_hash": "c0ffee"}, "configuration hash"), ({"weights_hash": "beef"}, "weights")):
        other = replace(plan_for(model, 2), model=replace(model, **changes))
        with pytest.raises(PlanError, match=f"another {what}.*c0ffee" if "config_hash" in changes else what) as caught:
            check_plan(other, context)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("use_cache", [{"use_cache": False}, {}])
def test_use_cache_of_a_configuration_makes_no_other_model(
    spec: ModelSpec, pool: InProcessPool, model: PlannedModel, tmp_path: Path, use_cache: dict[str, bool]
) -> None:
    folder = shutil.copytree(spec.source, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("use_cache") is True
    (folder / "config.json").write_text(json.dumps(config | use_cache))
    copy = replace(spec, source=str(folder))
    check_plan(plan_for(model, 2), ModelContext(copy, lambda _: pool))
    (folder / "config.json").write_text(json.dumps(config | use_cache | {"rms_norm_eps": 0.5}))
    with pytest.raises(PlanError, match="another configuration hash"):
        check_plan(plan_for(model, 2), ModelContext(copy, lambda _: pool))


def test_weights_in_other_files_are_refused_with_the_way_to_go_on(
    spec: ModelSpec, pool: InProcessPool, model: PlannedModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(spec.source, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in range(2):
        shard = {name: weights[name] for name in sorted(weights)[part::2]}
        save_file(shard, folder / f"model-{part}.safetensors")
    context, plan = ModelContext(replace(spec, source=str(folder)), lambda _: pool), plan_for(model, 2)
    with pytest.raises(PlanError, match=r"another weights hash .*set model\.weights_hash of the plan to null$"):
        check_plan(plan, context)
    data = json.loads(plan.to_json())
    data["model"]["weights_hash"] = None
    (tmp_path / "plan.json").write_text(json.dumps(data))
    check_plan(load_plan(tmp_path / "plan.json"), context)


def test_in_half_precision_window_masks_need_the_kernels_of_rules_and_caches_the_models_own(
    model: PlannedModel,
) -> None:
    for arm in plan_arms(plan_for(model, 2), PLAN_MODES, 0):
        assert need_headscan_kernels("bfloat16", [None, arm.intervention]) is (arm.selection == "forward")
        assert not need_headscan_kernels("float32", [None, arm.intervention])


def test_arms_do_not_depend_on_how_the_budget_was_asked_for(model: PlannedModel) -> None:
    shares = random_scores(model, 0)
    by_number = allocate(shares, WindowHeads(2), sink=4, recent=16)
    by_bytes = allocate(shares, KVBytes(planned_bytes(by_number, 8192), 8192), sink=4, recent=16)
    assert by_number.heads == by_bytes.heads and by_number.budget != by_bytes.budget
    assert plan_arms(by_number, PLAN_MODES, 2) == plan_arms(by_bytes, PLAN_MODES, 2)


def test_plans_that_free_nothing_are_noted(model: PlannedModel) -> None:
    (arm,) = plan_arms(allocate(random_scores(model, 0), WindowHeads(2), sink=4, recent=16), ["forward"], 0)
    short, long = Request(tuple(range(20)), 1), Request(tuple(range(21)), 1)
    assert window_notes([arm], [long, long]) == []
    (note,) = window_notes([arm], [short, long])
    assert "1 of 2 requests are longer than its narrowest window of 20 tokens" in note
    (note,) = window_notes([arm], [short])
    assert "frees nothing" in note
    (full,) = plan_arms(plan_for(model, 0), ["decode"], 0)
    (note,) = window_notes([full], [long])
    assert "keeps all tokens" in note
