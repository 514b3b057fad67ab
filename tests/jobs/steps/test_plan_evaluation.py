"""Plans in an evaluation: answers of an oracle in both modes, verdicts, resuming, placements and half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool, Pool
from headscan.engine import answer
from headscan.engine.arms import BASELINE, Arm
from headscan.errors import UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, PlanError, PlannedModel
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import PLAN_MODES, ChosenArms, ReplacementConfig, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.evaluate_chosen import evaluate_chosen
from headscan.steps.plan_arms import plan_arms
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from headscan.texts.harness import HeadscanLM
from headscan.texts.tasks import Tasks
from headscan.texts.token_requests import Request
from headscan.verdicts.judge import judge
from tests.jobs.conftest import THREADS, make_tokenizer, naive_likelihood, run_on
from tests.jobs.steps.kv_plans import decode_oracle, forward_oracle, model_of, plan_for
from tests.small_models import make_model


@pytest.fixture(scope="module")
def plan(model: PlannedModel) -> HeadPlan:
    return plan_for(model, [(0, 0), (1, 1), (2, 0)])


def config(spec: ModelSpec, task_folder: Path) -> Evaluate:
    tasks = TaskConfig(("counting",), include_path=str(task_folder), limit=4)
    return Evaluate(spec, tasks, recall=None)


def run(config: Evaluate, store: Store, pool: Pool, arms: Sequence[Arm]) -> str:
    return run_evaluation(config, run_on(pool, store, batch_tokens=60), arms)


def requests_of(spec: ModelSpec, tasks: TaskConfig) -> list[Request]:
    """Return the requests in the order of questions and choices."""
    adapter = HeadscanLM(identify(spec))
    Tasks(tasks).collect(adapter)
    return [request for request in adapter.requests.values() if isinstance(request, Request)]


def likelihoods(store: Store) -> dict[str, list[float]]:
    """Return the log-likelihoods by arm, in the order of `requests_of`."""
    rows = store.query(
        "select name, log_likelihoods from answers join arms using (arm_id) order by name, question"
    ).to_pylist()
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["name"], []).extend(row["log_likelihoods"])
    return found


@pytest.mark.slow
def test_the_command_line_evaluates_plans_in_both_modes(
    spec: ModelSpec,
    lm: LoadedModel,
    model: PlannedModel,
    plan: HeadPlan,
    task_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = plan_for(model, [(0, 1), (1, 0), (2, 1)])
    files = [str(each.save(tmp_path / f"{index}.json")) for index, each in enumerate((plan, other, plan))]
    command = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--limit", "4"]
    command += ["--no-recall", "--device", "cpu", "--store", str(tmp_path / "s.duckdb"), "--controls", "1"]
    command += ["--plan", ",".join(files), "--plan-mode", "forward,decode"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    store = Store(tmp_path / "s.duckdb")
    found = likelihoods(store)
    # A plan that is given twice is one arm, and both plans have the same random plans.
    assert len(found) == 1 + 2 * 2 + 2
    requests = requests_of(spec, config(spec, task_folder).tasks)
    assert found["baseline"] == pytest.approx([naive_likelihood(lm, r).log_likelihood for r in requests], abs=1e-4)
    for mode, oracle in (("forward", forward_oracle), ("decode", decode_oracle)):
        for each in (plan, other):
            (arm,) = plan_arms(each, [mode], 0)  # type: ignore[list-item]
            expected = [oracle(lm, each, request).log_likelihood for request in requests]
            assert found[arm.name] == pytest.approx(expected, abs=1e-4)
            assert max(abs(a - b) for a, b in zip(expected, found["baseline"], strict=True)) > 0.01
    rows = store.query("select kind, share, seed, selection, config from arms where kind <> 'baseline'").to_pylist()
    assert {row["selection"] for row in rows} == set(PLAN_MODES) and {row["share"] for row in rows} == {0.5}
    assert sorted(row["kind"] for row in rows) == ["plan"] * 4 + ["random_plan"] * 2
    rows_and_reasons = [line for line in said if line.startswith("plan ")]
    reasons = [line for line in rows_and_reasons if ": " in line]
    assert len(rows_and_reasons) == 8 and len(reasons) == 4
    for mode in PLAN_MODES:
        shown = [line for line in rows_and_reasons if f", {mode} " in line]
        assert len(shown) == 2 and all("50.0%" in line and line.endswith("not shown") for line in shown)
        assert sum(f", {mode}: the model itself is at or near chance" in line for line in reasons) == 2
    assert not any("heads ablated" in line for line in said)

    assert main(command) == 0
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]
    assert again == rows_and_reasons
    assert likelihoods(store) == found


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
            "(0.0% of KV heads keep less): not shown to be safe: the model itself is at or near chance"
            in arm.sentence()
        )


def test_a_stopped_evaluation_resumes_with_the_same_rows(
    spec: ModelSpec,
    plan: HeadPlan,
    pool: InProcessPool,
    task_folder: Path,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = [BASELINE, *plan_arms(plan, ["decode"], 0)]
    asked = config(spec, task_folder)
    run(asked, store, pool, arms)
    answered, calls = answer.evicted_likelihoods, []

    def stopped(lm: LoadedModel, requests: Sequence[Request], *given: Any) -> Any:
        calls.append(requests)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answered(lm, requests, *given)

    broken = Store(tmp_path / "broken.duckdb")
    monkeypatch.setattr(answer, "evicted_likelihoods", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(asked, broken, pool, arms)
    before = len(calls)
    run(asked, broken, pool, arms)
    assert likelihoods(broken) == likelihoods(store)
    assert calls[0] not in calls[before:] and calls[1] in calls[before:]  # its answers were stored


def test_layers_that_continue_token_by_token_are_refused_in_decode(
    task_folder: Path, store: Store, tmp_path: Path
) -> None:
    make_model("jamba", vocabulary=300).save_pretrained(tmp_path / "jamba")
    make_tokenizer(300).save_pretrained(tmp_path / "jamba")
    spec = ModelSpec(str(tmp_path / "jamba"))
    with InProcessPool(spec, THREADS) as pool:
        plan = plan_for(model_of(spec, pool.one(_itself, None)), 1)
        arms: list[Arm] = [BASELINE, *plan_arms(plan, ["decode"], 0)]
        with pytest.raises(UnsupportedModelError, match=r"only token by token\. Use the mode forward, or tasks"):
            run(config(spec, task_folder), store, pool, arms)
        assert not store.runs()
        run(config(spec, task_folder), store, pool, [BASELINE, *plan_arms(plan, ["forward"], 0)])
    assert {row["kind"] for row in store.query("from arms").to_pylist()} == {ArmKind.BASELINE, ArmKind.PLAN}


def _itself(lm: LoadedModel, item: object) -> LoadedModel:
    return lm
