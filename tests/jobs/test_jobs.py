"""The jobs as functions, and their rows as relations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import duckdb
import numpy as np
import pytest

import headscan
from headscan import jobs
from headscan.ablation.intervention import ZERO
from headscan.architectures import HEADS, LAYERS
from headscan.cli.main import main
from headscan.errors import HeadscanError, StoreError, StoreMissingError
from headscan.gates.gate_settings import GateFitConfig
from headscan.jobs import job_functions
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.plans import WindowShare
from headscan.runs.head_orders import head_order
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import CriteriaComparison, TaskConfig
from headscan.settings.saving_settings import PruneTexts
from headscan.steps.prune.pruning_units import ShareBudget
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from tests.jobs.conftest import quiet
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.sources import public_names


def test_scan_evaluate_and_plan_fill_the_tables(
    spec: ModelSpec, corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    path = tmp_path / "s.duckdb"
    texts = CorpusSpec(str(corpus_folder))
    run_id = jobs.scan(jobs.ScanConfig(spec, texts, TokenConfig(64)), path, devices=cpu, say=quiet).run_id
    verdict = jobs.evaluate(evaluation, path, [jobs.mask_arm([(0, 1)])], devices=cpu, say=quiet)
    tables = headscan.open_store(path)
    assert sorted(row[0] for row in tables.runs().project("kind").fetchall()) == ["evaluate", "scan"]
    assert "runs: 1 evaluate, 1 scan. Methods: runs," in repr(tables) and run_id in repr(tables)
    assert f"<td>{run_id}</td><td>scan</td>" in tables._repr_html_()
    heads = tables.heads(run_id[:6]).to_arrow_table()
    assert heads.num_rows == 18
    scores = tables.scores()
    means = scores.aggregate("layer, head, avg(output_norm_ln) AS mean", "layer, head").fetchall()
    found = {(layer, head): mean for layer, head, mean in means}
    for row in heads.select(["layer", "head", "output_norm_ln"]).to_pylist():
        assert found[row["layer"], row["head"]] == pytest.approx(row["output_norm_ln"])
    (arm,) = verdict.arms
    own = tables.verdicts().filter(f"arm = '{arm.name}' AND task = '(all)'").project("accuracy, baseline").fetchall()
    assert len(own) == 1
    accuracies = dict(tables.arms().filter("task = '(all)'").project("arm, accuracy").fetchall())
    assert own == [(accuracies[arm.name], accuracies["baseline"])]
    assert tables.plans().fetchall() == []
    fifth = heads.select(["layer", "head", "entropy"]).to_pylist()[4]
    (cells,) = tables.head_map("entropy").data
    assert cells.z[fifth["layer"]][fifth["head"]] == pytest.approx(fifth["entropy"])
    assert tables.verdict(verdict.run_id[:6]) == verdict and tables.verdict().by_name[arm.name].label == arm.label
    (points,) = tables.arm_chart().data
    assert list(points.x) == [arm.paired.difference]
    by_score = jobs.ChosenArms(criterion="output_norm_ln", share=0.2, rule=True, controls=1)
    chosen = jobs.evaluate(evaluation, path, by_score, devices=cpu, say=quiet).by_name
    # The arm above answered the same questions, so all belong to one run.
    assert sorted(each.kind for each in chosen.values()) == ["mask", "mask", "random_mask", "random_rule", "rule"]
    assert isinstance(tables.query("select 1"), duckdb.DuckDBPyRelation)
    # The relations hold their rows: the store is closed, and can be written.
    Store(path, lock_timeout=0).finish_run(run_id)

    plan = jobs.plan(
        jobs.PlanConfig(spec, texts, recents=(8,), max_tokens=64, sequences=4, recall_prompts=0),
        None,
        WindowShare(0.5),
        devices=cpu,
        say=quiet,
    )
    assert plan.budget.window_heads == 3


def test_export_writes_the_model_and_names_its_files(tmp_path: Path) -> None:
    done = jobs.export(jobs.ExportConfig("decilm", tmp_path / "served", jobs.ModelSpec("demo")))
    assert done.files == (str(tmp_path / "served"),) and (tmp_path / "served" / "config.json").is_file()
    assert [each.model for each in done.sizes[:2]] == ["original", "this model"]
    assert "vllm serve" in done.lines[1]
    for config, store in (
        (jobs.ExportConfig("parquet", tmp_path / "tables"), None),
        (jobs.ExportConfig("rlkv", tmp_path / "pattern"), tmp_path / "s.duckdb"),
    ):
        with pytest.raises(HeadscanError, match=r"^`store` goes with parquet: give both or neither$"):
            jobs.export(config, store)


@pytest.mark.parametrize("arms", [[], [jobs.BASELINE], jobs.ChosenArms()])
def test_the_baseline_alone_has_a_verdict_without_arms(
    arms: list[jobs.Arm] | jobs.ChosenArms, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store = tmp_path / "s.duckdb"
    verdict = jobs.evaluate(evaluation, store, arms, devices=cpu, say=quiet)
    (run,) = Store(store).runs()
    assert (verdict.run_id, verdict.model, verdict.finished) == (run["run_id"], run["model"], ())
    assert run["status"] == "finished"


def test_the_verb_and_the_job_judge_the_arms_that_a_run_has(
    evaluation: jobs.EvaluateConfig,
    cpu: jobs.PlacementRequest,
    task_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also those of an earlier call, if this one asks the baseline alone."""
    store, task = tmp_path / "s.duckdb", ["--tasks", "counting", "--include-path", str(task_folder), "--limit", "6"]
    jobs.evaluate(evaluation, store, [jobs.mask_arm([(0, 1)])], devices=cpu, say=quiet)
    verdict = jobs.evaluate(evaluation, store, [], devices=cpu, say=quiet)
    words = ["evaluate", evaluation.model.source, *task, "--no-recall", "--device", "cpu", "--store", str(store)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in found["rows"]] == [arm.name for arm in verdict.arms] == ["mask 0:1"]
    assert (found["run_id"], found["unfinished"]) == (verdict.run_id, 0)


def test_arms_of_one_name_are_equal(
    evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store, mask = tmp_path / "s.duckdb", jobs.mask_arm([(0, 1)])
    same = replace(jobs.mask_arm([(0, 1)]), measured=(("seconds", 3),))
    other = replace(jobs.mask_arm([(1, 1)]), name=mask.name)
    with pytest.raises(HeadscanError, match=r"^2 different arms are named 'mask 0:1' \(limit 1\)\. Give each .*$"):
        jobs.evaluate(evaluation, store, [mask, other], devices=cpu, say=quiet)
    (judged,) = jobs.evaluate(evaluation, store, [mask, same], devices=cpu, say=quiet).arms
    assert judged.name == mask.name


def test_a_rule_by_hand_has_random_controls(
    evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    lm = headscan.load(evaluation.model.source, device="cpu")
    rule = jobs.rule_arm(headscan.HeadRule("output_norm_ln", 0.7), share=0.2)
    arms = [rule, *jobs.random_controls(lm.grid, [rule], 3)]
    judged = jobs.evaluate(evaluation, tmp_path / "s.duckdb", arms, devices=cpu, say=quiet).by_name
    controls = judged["rule output_norm_ln 0.7 20%"].controls
    assert controls is not None and controls.arms == tuple(f"random rule 20% seed {seed}" for seed in range(3))
    assert (judged[rule.name].arm.criterion, judged[rule.name].arm.share) == ("output_norm_ln", 0.2)
    without = jobs.rule_arm(headscan.HeadRule("output_norm_ln", np.float32(0.5)))
    (alone,) = jobs.evaluate(evaluation, tmp_path / "t.duckdb", [without], devices=cpu, say=quiet).arms
    assert alone.controls is None and alone.name == "rule output_norm_ln 0.5"
    with pytest.raises(HeadscanError, match=r"^rule output_norm_ln 0\.5 has no share, .* Pass `share` to rule_arm$"):
        jobs.random_controls(lm.grid, [rule, without], 3)
    with pytest.raises(HeadscanError, match=r"^`share=2` \(limit above 0, at most 1\)\. Change `share`$"):
        jobs.rule_arm(headscan.HeadRule("output_norm_ln", 0.7), share=2)


def test_controls_replace_outputs_as_their_arms_do(spec: ModelSpec) -> None:
    lm = headscan.load(spec.source, device="cpu")
    means = headscan.head_means(lm, [[1, 2, 3]])
    rule = jobs.rule_arm(headscan.HeadRule("entropy", 0.5, means, jobs.MassWidths(sink=2)), share=0.2)
    (control,) = jobs.random_controls(lm.grid, [rule], 1)
    assert control.intervention == headscan.RandomHeads(0.2, 0, means)
    assert control.name == f"random rule 20% seed 0 by mean {means.digest[:6]}"
    assert rule.settings.keys() == {"scan_run", "replacement_texts", "sink", "recent"}
    assert rule.name == f"rule entropy 0.5 20%, sink 2, recent {jobs.MassWidths().recent} by mean {means.digest[:6]}"
    other = type("Halved", (type(ZERO),), {})()
    with pytest.raises(HeadscanError, match=r"^arms replace outputs by zero, .*, not by Halved\. Use one of these$"):
        jobs.mask_arm([(0, 1)], other)
    mask = jobs.mask_arm([(0, 1)], means)
    assert mask.intervention == headscan.HeadMask([(0, 1)], means)
    assert mask.name == f"mask 0:1 by mean {means.digest[:6]}"
    with pytest.raises(HeadscanError, match=r"outputs of their heads in 2 ways \(limit 1\)\. Draw controls for each$"):
        jobs.random_controls(lm.grid, [rule, jobs.mask_arm([(0, 1)])], 1)


def test_text_alone_judges_heads_that_are_replaced_by_their_mean(
    spec: ModelSpec, corpus_folder: Path, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    text = jobs.HeldOutText.of_corpus(CorpusSpec(str(corpus_folder)), spec, sequences=4, max_tokens=32)
    config = jobs.EvaluateConfig(spec, TaskConfig(), recall=None, text=text)
    means = jobs.ReplacementConfig("mean", CorpusSpec(str(corpus_folder)), texts=4)
    chosen = jobs.ChosenArms(heads=((0, 1), (1, 2)), replacement=means)
    jobs.evaluate(config, tmp_path / "s.duckdb", chosen, devices=cpu, say=quiet)
    asked = "SELECT count(*) AS answers, count(DISTINCT arm_id) AS arms FROM answers WHERE task = 'text'"
    assert {Path(chunk.document).suffix for chunk in text.chunks} == {".txt"}  # short documents are one block each
    with pytest.raises(HeadscanError, match="`max_tokens=1` is below"):
        jobs.HeldOutText.of_corpus(CorpusSpec(str(corpus_folder)), spec, max_tokens=1)
    assert Store(tmp_path / "s.duckdb").query(asked).to_pylist() == [{"answers": 8, "arms": 2}]


def test_texts_of_a_notebook_are_held_out_text(spec: ModelSpec, corpus_folder: Path) -> None:
    given = [path.read_text("utf-8") for path in sorted(corpus_folder.glob("*.txt"))]
    text = jobs.HeldOutText.of_texts(given, spec, max_tokens=32)
    read = jobs.HeldOutText.of_corpus(CorpusSpec(str(corpus_folder)), spec, sequences=1000, max_tokens=32)
    assert {chunk.ids for chunk in text.chunks} == {chunk.ids for chunk in read.chunks}
    assert {chunk.document for chunk in text.chunks} <= {f"text {number}" for number in range(1, len(given) + 1)}
    with pytest.raises(HeadscanError, match=r"^`texts` is one text: 'a text'. Pass a list of texts$"):
        jobs.HeldOutText.of_texts("a text", spec)
    with pytest.raises(HeadscanError, match="gave no sequence"):
        jobs.HeldOutText.of_texts(["short"], spec)


def test_every_measuring_job_fills_its_table(
    spec: ModelSpec, corpus_folder: Path, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    """The same call again measures nothing."""
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    measuring = jobs.ImportanceConfig(spec, texts, TokenConfig(64))
    probing = jobs.ProbeConfig(spec, ("induction_score",), probe=BehaviourProbe(sequences=2, tokens=8))
    fitting = jobs.GatesConfig(spec, texts, GateFitConfig(share=0.3, steps=4), sequences=8, max_tokens=32)
    found = [
        jobs.importance(measuring, store, devices=cpu, say=quiet),
        jobs.probe(probing, store, devices=cpu, say=quiet),
        jobs.gates(fitting, store, devices=cpu, say=quiet),
    ]
    again = [
        jobs.importance(measuring, store, devices=cpu, say=quiet),
        jobs.probe(probing, store, devices=cpu, say=quiet),
        jobs.gates(fitting, store, devices=cpu, say=quiet),
    ]
    assert [each.run_id for each in again] == [each.run_id for each in found]
    assert not any(each.already_done for each in found) and all(each.already_done for each in again)
    for result, name in zip(found, ("importance", "induction_score", "gate"), strict=True):
        assert len(head_order(Store(store), result.run_id, name)) == 18


def test_ablate_sweep_and_referee_judge_their_arms(
    spec: ModelSpec, corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    effects = jobs.ablate(jobs.AblateConfig(evaluation), store, devices=cpu, say=quiet).effects
    assert len(effects) == 18
    sweeping = jobs.SweepConfig(evaluation, ("entropy",), (0.2,), mask_criteria=("effect",), controls=0, confirm=False)
    swept = jobs.sweep(sweeping, store, devices=cpu, say=quiet)
    assert [arm.name.partition(" of ")[0] for arm in swept.verdict.arms] == ["rule entropy 20%", "mask effect 20%"]
    assert {choice.verdict.name for choice in swept.choices} == {arm.name for arm in swept.verdict.arms}
    assert not any(choice.confirmed for choice in swept.choices)
    confirmed = jobs.sweep(replace(sweeping, confirm=True), store, devices=cpu, say=quiet)
    assert confirmed.verdict == swept.verdict and len(confirmed.choices) == 2
    for choice in confirmed.choices:
        assert choice.confirmed and choice.selected_on + choice.verdict.paired.questions == 6
    masked = Store(store).query(
        "SELECT layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE criterion = 'effect' ORDER BY layer, head"
    )
    least = sorted(effects, key=lambda effect: (effect.harm, effect.layer, effect.head))[:4]
    assert masked.to_pylist() == [
        {"layer": layer, "head": head} for layer, head in sorted((each.layer, each.head) for each in least)
    ]
    comparing = jobs.RefereeConfig(
        evaluation,
        CriteriaComparison(("importance", "importance_recall"), (0.5,), controls=0),
        texts=PruneTexts(texts, sequences=6, max_tokens=200),
    )
    compared = jobs.referee(comparing, store, devices=cpu, say=quiet)
    assert [arm.name.partition(" of ")[0] for arm in compared.arms] == ["importance 50%", "importance_recall 50%"]


def test_labelled_examples_judge_the_heads_of_a_classifier(
    labelled: jobs.LabelledEvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store = tmp_path / "s.duckdb"
    measuring = jobs.LabelledImportanceConfig(labelled.model, labelled.data)
    run_id = jobs.labelled_importance(measuring, store, devices=cpu, say=quiet).run_id
    assert len(head_order(Store(store), run_id, "importance")) == LAYERS * HEADS
    ablating = jobs.LabelledAblateConfig(labelled)
    assert len(jobs.labelled_ablate(ablating, store, devices=cpu, say=quiet).effects) == LAYERS * HEADS
    comparing = jobs.LabelledRefereeConfig(labelled, CriteriaComparison(("importance",), (0.5,), controls=0))
    (point,) = jobs.labelled_referee(comparing, store, devices=cpu, say=quiet).points
    assert (point.curve[0], point.share) == ("importance", 0.5)


def test_prune_saves_a_model_that_loads(
    corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    config = jobs.PruneConfig(
        evaluation=evaluation,
        out=str(tmp_path / "smaller"),
        budgets=(ShareBudget(0.3),),
        texts=PruneTexts(CorpusSpec(str(corpus_folder)), sequences=16, max_tokens=64),
        timing=None,
        skip_verdict=True,
    )
    (built,) = jobs.prune(config, tmp_path / "s.duckdb", devices=cpu, say=quiet).models
    assert len(list(headscan.load(built.folder, device="cpu").grid.heads())) < 18


def test_prune_takes_the_order_of_a_criterion_from_the_store(
    spec: ModelSpec, corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    config = jobs.PruneConfig(
        evaluation,
        tmp_path / "smaller",
        (ShareBudget(0.2),),
        ("output_norm_ln",),
        texts=PruneTexts(texts, sequences=4, max_tokens=64),
        repair=jobs.RepairChoice("none"),
        timing=None,
        skip_verdict=True,
    )
    with pytest.raises(HeadscanError, match="there is no store at"):
        jobs.prune(config, store, devices=cpu, say=quiet)
    run_id = jobs.scan(jobs.ScanConfig(spec, texts, TokenConfig(64)), store, devices=cpu, say=quiet).run_id
    with pytest.raises(HeadscanError, match="has no scan run none"):
        jobs.prune(replace(config, run_id="none"), store, devices=cpu, say=quiet)
    (built,) = jobs.prune(replace(config, run_id=run_id[:6]), store, devices=cpu, say=quiet).models
    first = head_order(Store(store), run_id, "output_norm_ln")[: len(built.removed)]
    assert built.removed == tuple(sorted((each.layer, each.head) for each in first)) and len(first) == 4


def test_the_results_of_all_jobs_are_exported() -> None:
    arms = {"mask_arm", "rule_arm", "random_controls"}
    functions = [getattr(jobs, name) for name in public_names(jobs) - arms if name.islower()]
    names = vars(job_functions) | vars(jobs) | {"BudgetRequest": None}
    assert {get_type_hints(each, names)["return"].__name__ for each in functions} <= public_names(jobs)


def test_the_checked_options_of_jobs_are_the_declared_ones() -> None:
    assert get_type_hints(jobs.JobOptions) == get_type_hints(job_functions._CheckedOptions)


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match=r"there is no store at .*none.duckdb"):
        headscan.open_store(tmp_path / "none.duckdb")


def test_generate_returns_both_texts(spec: ModelSpec, cpu: jobs.PlacementRequest) -> None:
    plan = plan_for(model_of(spec, headscan.load(spec.source)), 5)
    config = jobs.GenerateConfig(spec, plan, "a text to continue " * 4, max_new_tokens=6)
    found = jobs.generate(config, devices=cpu, say=quiet)
    tokenizer = identify(spec).tokenizer
    assert found.prompt_tokens == len(tokenizer(config.prompt)["input_ids"])
    for one in (found.full, found.planned):
        assert len(one.tokens) == 6 and one.text == tokenizer.decode(list(one.tokens))
    assert found.planned.cache_bytes < found.full.cache_bytes
    with pytest.raises(HeadscanError, match=r"^`resume_anyway` has no effect on `generate`: leave it out$"):
        jobs.generate(config, resume_anyway=True)
    for seconds in (5.0, 0.0):
        with pytest.raises(HeadscanError, match=r"^`lock_timeout` has no effect on `generate`: leave it out$"):
            jobs.generate(config, lock_timeout=seconds)
    with pytest.raises(HeadscanError, match=r"^`plan='p\.json'` is no HeadPlan\. Read it with load_plan$"):
        replace(config, plan="p.json")


def test_a_plan_without_a_store_cannot_resume(spec: ModelSpec) -> None:
    config = jobs.PlanConfig(spec, CorpusSpec("texts/"))
    with pytest.raises(HeadscanError, match=r"^`resume_anyway` has no effect without `store`: leave it out$"):
        jobs.plan(config, None, WindowShare(0.5), resume_anyway=True)
    for seconds in (5.0, 0.0):
        with pytest.raises(HeadscanError, match=r"^`lock_timeout` has no effect without `store`: leave it out$"):
            jobs.plan(config, None, WindowShare(0.5), lock_timeout=seconds)


def test_a_wait_out_of_range_is_an_error_of_the_store(spec: ModelSpec, tmp_path: Path) -> None:
    config = jobs.ScanConfig(spec, CorpusSpec("python-stdlib"), jobs.TokenConfig(40))
    with pytest.raises(StoreError, match=r"^`lock_timeout=-1` \(limit 0\)\. Raise `lock_timeout`$"):
        jobs.scan(config, tmp_path / "s.duckdb", lock_timeout=-1)
