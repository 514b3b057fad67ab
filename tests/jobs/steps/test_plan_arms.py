"""Arms of a plan, evaluations of them, plans of other models, and caches from a plan alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicSlidingWindowLayer

import headscan
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool, Pool
from headscan.engine.answer import need_headscan_kernels
from headscan.engine.arms import BASELINE, Arm
from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.kv_windows import KvEviction, KvWindows
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import (
    HeadPlan,
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
from headscan.settings.evaluation_settings import PLAN_MODES, ChosenArms, ReplacementConfig, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.evaluate_chosen import evaluate_chosen
from headscan.steps.plan_arms import check_plan, plan_arms, window_notes
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from headscan.texts.token_requests import Request
from headscan.verdicts.judge import judge
from headscan.windows import KeptKeys
from tests.instrument.kv.cache_plans import greedily, some_ids
from tests.jobs.conftest import THREADS, make_tokenizer, run_on
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.small_models import make_model


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
    assert "requests longer than its narrowest window of 20 tokens: 1 of 2" in note
    (note,) = window_notes([arm], [short])
    assert "frees nothing" in note
    (full,) = plan_arms(plan_for(model, 0), ["decode"], 0)
    (note,) = window_notes([full], [long])
    assert "keeps all tokens" in note


@pytest.fixture(scope="module")
def plan(model: PlannedModel) -> HeadPlan:
    return plan_for(model, [(0, 0), (1, 1), (2, 0)])


def config(spec: ModelSpec, task_folder: Path) -> Evaluate:
    tasks = TaskConfig(("counting",), include_path=str(task_folder), limit=4)
    return Evaluate(spec, tasks, recall=None)


def run(config: Evaluate, store: Store, pool: Pool, arms: Sequence[Arm]) -> str:
    return run_evaluation(config, run_on(pool, store, batch_tokens=60), arms)


def likelihoods(store: Store) -> dict[str, list[float]]:
    """Return the log-likelihoods by arm, in the order of `requests_of`."""
    rows = store.query(
        "select name, log_likelihoods from answers join arms using (arm_id) order by name, question"
    ).to_pylist()
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["name"], []).extend(row["log_likelihoods"])
    return found


def test_the_command_line_evaluates_plans_in_both_modes(
    spec: ModelSpec, model: PlannedModel, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that is given twice is one arm, and both plans have the same random plans."""
    plans = [plan_for(model, windows) for windows in ([(0, 0), (1, 1), (2, 0)], [(0, 1), (1, 0), (2, 1)])]
    files = [str(each.save(tmp_path / f"{index}.json")) for index, each in enumerate((*plans, plans[0]))]
    command = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--limit", "4"]
    command += ["--no-recall", "--device", "cpu", "--store", str(tmp_path / "s.duckdb"), "--controls", "1"]
    command += ["--plan", ",".join(files), "--plan-mode", "forward,decode"]
    assert main(command) == 0
    said = capsys.readouterr().out
    rows = Store(tmp_path / "s.duckdb").query("select * from arms where kind <> 'baseline'").to_pylist()
    expected = {arm.name for each in plans for arm in plan_arms(each, PLAN_MODES, 1)}
    assert {row["name"] for row in rows} == expected and len(rows) == len(expected) == 6
    assert {row["selection"] for row in rows} == set(PLAN_MODES) and {row["share"] for row in rows} == {0.5}
    shown = [line for line in said.splitlines() if line.startswith("plan ")]
    assert len(shown) == 8 and sum("the model itself is at or near chance" in line for line in shown) == 4
    assert sum("50 %" in line and line.endswith(("not shown", "probably loses")) for line in shown) == 4
    assert "heads ablated" not in said


def test_a_plan_of_another_model_is_refused_before_outputs_are_collected(
    spec: ModelSpec,
    model: PlannedModel,
    pool: InProcessPool,
    task_folder: Path,
    corpus_folder: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def collects(*_: object) -> None:
        pytest.fail("collected outputs")

    monkeypatch.setattr("headscan.steps.evaluate_chosen.collect_replacement", collects)
    other = plan_for(replace(model, config_hash="other"), 1)
    means = ReplacementConfig("mean", CorpusSpec(str(corpus_folder)))
    chosen = ChosenArms(heads=((0, 1),), plans=(other,), replacement=means)
    with pytest.raises(PlanError, match="another configuration hash"):
        evaluate_chosen(config(spec, task_folder), run_on(pool, store), chosen)


def test_full_heads_are_the_baseline(
    spec: ModelSpec, model: PlannedModel, pool: InProcessPool, task_folder: Path, store: Store
) -> None:
    arms = [BASELINE, *plan_arms(plan_for(model, 0), PLAN_MODES, 0)]
    run_id = run(config(spec, task_folder), store, pool, arms)
    baseline, *others = likelihoods(store).values()
    assert len(others) == 2
    for found in others:
        assert found == pytest.approx(baseline, abs=1e-4)
    for arm in judge(store, run_id).arms:
        assert arm.paired.difference == 0
        assert (
            "(0 % of KV heads keep less): not shown to be safe: the model itself is at or near chance" in arm.sentence()
        )


def test_layers_that_continue_token_by_token_are_refused_in_decode(
    task_folder: Path, store: Store, tmp_path: Path
) -> None:
    make_model("jamba", vocabulary=300).save_pretrained(tmp_path / "jamba")
    make_tokenizer(300).save_pretrained(tmp_path / "jamba")
    spec = ModelSpec(str(tmp_path / "jamba"))
    with InProcessPool(spec, THREADS) as pool:
        plan = plan_for(model_of(spec, pool.one(lambda lm, _: lm, None)), 1)
        arms: list[Arm] = [BASELINE, *plan_arms(plan, ["decode"], 0)]
        with pytest.raises(UnsupportedModelError, match=r"only token by token\. Use the mode forward, or tasks"):
            run(config(spec, task_folder), store, pool, arms)
        assert not store.runs()
        run(config(spec, task_folder), store, pool, [BASELINE, *plan_arms(plan, ["forward"], 0)])
    assert {row["kind"] for row in store.query("from arms").to_pylist()} == {ArmKind.BASELINE, ArmKind.PLAN}


def model_and_plan(family: str, folder: Path) -> tuple[LoadedModel, HeadPlan]:
    make_model(family, vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    spec = ModelSpec(str(folder), "float32")
    lm = headscan.load(folder, device="cpu", dtype="float32")
    return lm, load_plan(plan_for(model_of(spec, lm), 2, recent=7).save(folder / "plan.json"))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mimo_v2_flash"])
def test_a_plan_knows_the_layers_of_its_model(family: str, tmp_path: Path) -> None:
    lm, plan = model_and_plan(family, tmp_path)
    ids = some_ids(2, 40)
    config = lm.model.config.get_text_config(decoder=True)
    alone, both = headscan.PlanCache(plan), headscan.PlanCache(plan, config)
    if lm.model.config._attn_implementation == "eager":
        lm.model.set_attn_implementation("headscan-cache")
    assert [type(layer) for layer in alone.layers] == [type(layer) for layer in both.layers]
    assert any(isinstance(layer, DynamicSlidingWindowLayer) for layer in alone.layers) == (family != "llama")
    found, expected = greedily(lm, alone, ids, 6), greedily(lm, both, ids, 6)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert alone.nbytes == both.nbytes


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3n"])
def test_layers_that_a_plan_does_not_describe_need_the_configuration(family: str, tmp_path: Path) -> None:
    lm, plan = model_and_plan(family, tmp_path)
    with pytest.raises(PlanMismatchError, match=r"no entry for layer \d+, .* Pass its configuration as `config`"):
        headscan.PlanCache(plan)
    config = lm.model.config.get_text_config(decoder=True)
    assert greedily(lm, headscan.PlanCache(plan, config), some_ids(1, 20), 2)[0].shape == (1, 22)


def test_windows_without_the_numbers_of_kv_heads_make_no_cache() -> None:
    kept = headscan.KeptKeys.of([(0, 0, headscan.Window(1, 3))])
    for counts in (None, {}, {1: 2}, {0: 0, 1: 2}):
        with pytest.raises(PlanMismatchError, match="number of KV heads of layer 0 is unknown"):
            headscan.PlanCache(headscan.KeptKeys.of(kept.windows, counts))
    for wrong in (-1, "2", 2.0):
        with pytest.raises(PlanMismatchError, match=r"`kv_heads` of layer 0 is .* \(limit a whole number"):
            headscan.PlanCache(headscan.KeptKeys.of(kept.windows, {0: wrong}))  # type: ignore[dict-item]
    assert len(headscan.PlanCache(headscan.KeptKeys.of(kept.windows, {0: 2, 1: 2})).layers) == 2
