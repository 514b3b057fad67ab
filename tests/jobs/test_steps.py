"""The steps in Python, and their rows as relations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import duckdb
import numpy as np
import pytest

import headscan
from headscan import (
    BASELINE,
    Ablate,
    BehaviourProbe,
    ChosenArms,
    CorpusSpec,
    CriteriaComparison,
    Evaluate,
    ExportConfig,
    GateFitConfig,
    Gates,
    Generate,
    HeldOutText,
    Importance,
    LossTexts,
    MassWidths,
    ModelSpec,
    PlacementRequest,
    Plan,
    Probe,
    Prune,
    PruneTexts,
    Referee,
    RepairChoice,
    ReplacementConfig,
    Scan,
    Sweep,
    TokenConfig,
    mask_arm,
    random_controls,
    rule_arm,
    run_export,
)
from headscan.ablation.intervention import ZERO
from headscan.architectures import HEADS, LAYERS
from headscan.cli.main import main
from headscan.errors import HeadscanError, StoreError, StoreMissingError
from headscan.runs.head_orders import head_order
from headscan.runs.model_identity import identify
from headscan.steps import open_run
from headscan.steps.step import Step
from headscan.store.store import Store
from tests.jobs.conftest import quiet
from tests.jobs.steps.kv_plans import model_of, plan_for


@pytest.fixture
def here(cpu: PlacementRequest) -> dict[str, Any]:
    """Options of a step that runs on the CPU and prints nothing."""
    return {"devices": cpu, "say": quiet}


def test_scan_evaluate_and_plan_fill_the_tables(
    spec: ModelSpec, corpus_folder: Path, evaluation: Evaluate, here: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "s.duckdb"
    texts = CorpusSpec(str(corpus_folder))
    run_id = Scan(spec, texts, TokenConfig(64)).run(path, **here).run_id
    verdict = replace(evaluation, arms=[mask_arm([(0, 1)])]).run(path, **here)
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
    assert own[0] == pytest.approx((accuracies[arm.name], accuracies["baseline"]))
    assert tables.plans().fetchall() == []
    fifth = heads.select(["layer", "head", "entropy"]).to_pylist()[4]
    (cells,) = tables.head_map("entropy").data
    assert cells.z[fifth["layer"]][fifth["head"]] == pytest.approx(fifth["entropy"])
    assert tables.verdict(verdict.run_id[:6]) == verdict and tables.verdict().by_name[arm.name].label == arm.label
    (points,) = tables.arm_chart().data
    assert list(points.x) == [arm.paired.difference]
    by_score = ChosenArms(criterion="output_norm_ln", share=0.2, rule=True, controls=1)
    chosen = replace(evaluation, arms=by_score).run(path, **here).by_name
    # The arm above answered the same questions, so all belong to one run.
    assert sorted(each.kind for each in chosen.values()) == ["mask", "mask", "random_mask", "random_rule", "rule"]
    assert isinstance(tables.query("select 1"), duckdb.DuckDBPyRelation)
    # The relations hold their rows: the store is closed, and can be written.
    Store(path, lock_timeout=0).finish_run(run_id)

    measured = Plan(
        spec,
        method="measured",
        corpus=texts,
        recent=(8,),
        max_tokens=64,
        sequences=4,
        recall_prompts=0,
        out=tmp_path / "plan.json",
    )
    plan = measured.run(None, **here)
    assert plan.budget.window_heads == 3 and headscan.load_plan(tmp_path / "plan.json") == plan


def test_export_writes_the_model_and_names_its_files(tmp_path: Path) -> None:
    done = run_export(ExportConfig("decilm", tmp_path / "served", ModelSpec("demo")), None)
    assert done.files == (str(tmp_path / "served"),) and (tmp_path / "served" / "config.json").is_file()
    assert [each.model for each in done.sizes[:2]] == ["original", "this model"]
    assert "vllm serve" in done.lines[1]
    for config, store in (
        (ExportConfig("parquet", tmp_path / "tables"), None),
        (ExportConfig("rlkv", tmp_path / "pattern"), Store(tmp_path / "s.duckdb")),
    ):
        with pytest.raises(HeadscanError, match=r"^`store` goes with parquet: give both or neither$"):
            run_export(config, store)


@pytest.mark.parametrize("arms", [[], [BASELINE], ChosenArms()])
def test_the_baseline_alone_has_a_verdict_without_arms(
    arms: list[headscan.Arm] | ChosenArms, evaluation: Evaluate, here: dict[str, Any], tmp_path: Path
) -> None:
    store = tmp_path / "s.duckdb"
    verdict = replace(evaluation, arms=arms).run(store, **here)
    (run,) = Store(store).runs()
    assert (verdict.run_id, verdict.model, verdict.finished) == (run["run_id"], run["model"], ())
    assert run["status"] == "finished"


def test_the_verb_and_the_step_judge_the_arms_that_a_run_has(
    evaluation: Evaluate, here: dict[str, Any], task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those of an earlier call, if this one asks the baseline alone."""
    store, task = tmp_path / "s.duckdb", ["--tasks", "counting", "--include-path", str(task_folder), "--limit", "6"]
    replace(evaluation, arms=[mask_arm([(0, 1)])]).run(store, **here)
    verdict = evaluation.run(store, **here)
    words = ["evaluate", evaluation.model.source, *task, "--no-recall", "--device", "cpu", "--store", str(store)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in found["rows"]] == [arm.name for arm in verdict.arms] == ["mask 0:1"]
    assert (found["run_id"], found["unfinished"]) == (verdict.run_id, 0)


def test_arms_of_one_name_are_equal(evaluation: Evaluate, here: dict[str, Any], tmp_path: Path) -> None:
    store, mask = tmp_path / "s.duckdb", mask_arm([(0, 1)])
    same = replace(mask_arm([(0, 1)]), measured=(("seconds", 3),))
    other = replace(mask_arm([(1, 1)]), name=mask.name)
    with pytest.raises(HeadscanError, match=r"^2 different arms are named 'mask 0:1' \(limit 1\)\. Give each .*$"):
        replace(evaluation, arms=[mask, other]).run(store, **here)
    (judged,) = replace(evaluation, arms=[mask, same]).run(store, **here).arms
    assert judged.name == mask.name


def test_a_rule_by_hand_has_random_controls(evaluation: Evaluate, here: dict[str, Any], tmp_path: Path) -> None:
    lm = headscan.load(evaluation.model.source, device="cpu")
    rule = rule_arm(headscan.HeadRule("output_norm_ln", 0.7), share=0.2)
    arms = [rule, *random_controls(lm.grid, [rule], 3)]
    judged = replace(evaluation, arms=arms).run(tmp_path / "s.duckdb", **here).by_name
    controls = judged["rule output_norm_ln 0.7 20%"].controls
    assert controls is not None and controls.arms == tuple(f"random rule 20% seed {seed}" for seed in range(3))
    assert (judged[rule.name].arm.criterion, judged[rule.name].arm.share) == ("output_norm_ln", 0.2)
    without = rule_arm(headscan.HeadRule("output_norm_ln", np.float32(0.5)))
    (alone,) = replace(evaluation, arms=[without]).run(tmp_path / "t.duckdb", **here).arms
    assert alone.controls is None and alone.name == "rule output_norm_ln 0.5"
    with pytest.raises(HeadscanError, match=r"^rule output_norm_ln 0\.5 has no share, .* Pass `share` to rule_arm$"):
        random_controls(lm.grid, [rule, without], 3)
    with pytest.raises(HeadscanError, match=r"^`share=2` \(limit above 0, at most 1\)\. Change `share`$"):
        rule_arm(headscan.HeadRule("output_norm_ln", 0.7), share=2)


def test_controls_replace_outputs_as_their_arms_do(spec: ModelSpec) -> None:
    lm = headscan.load(spec.source, device="cpu")
    means = headscan.head_means(lm, [[1, 2, 3]])
    rule = rule_arm(headscan.HeadRule("entropy", 0.5, means, MassWidths(sink=2)), share=0.2)
    (control,) = random_controls(lm.grid, [rule], 1)
    assert control.intervention == headscan.RandomHeads(0.2, 0, means)
    assert control.name == f"random rule 20% seed 0 by mean {means.digest[:6]}"
    assert rule.settings.keys() == {"scan_run", "replacement_texts", "sink", "recent"}
    assert rule.name == f"rule entropy 0.5 20%, sink 2, recent {MassWidths().recent} by mean {means.digest[:6]}"
    other = type("Halved", (type(ZERO),), {})()
    with pytest.raises(HeadscanError, match=r"^arms replace outputs by zero, .*, not by Halved\. Use one of these$"):
        mask_arm([(0, 1)], other)
    mask = mask_arm([(0, 1)], means)
    assert mask.intervention == headscan.HeadMask([(0, 1)], means)
    assert mask.name == f"mask 0:1 by mean {means.digest[:6]}"
    with pytest.raises(HeadscanError, match=r"outputs of their heads in 2 ways \(limit 1\)\. Draw controls for each$"):
        random_controls(lm.grid, [rule, mask_arm([(0, 1)])], 1)


def test_text_alone_judges_heads_that_are_replaced_by_their_mean(
    spec: ModelSpec, corpus_folder: Path, here: dict[str, Any], tmp_path: Path
) -> None:
    texts = CorpusSpec(str(corpus_folder))
    text = HeldOutText.of_corpus(texts, spec, sequences=4, max_tokens=32)
    chosen = ChosenArms(heads=((0, 1), (1, 2)), replacement=ReplacementConfig("mean", texts=4))
    step = Evaluate(spec, recall=None, text=text, arms=chosen, corpus=texts)
    assert step.arms == replace(chosen, replacement=ReplacementConfig("mean", texts, texts=4))
    run_id = step.run(tmp_path / "s.duckdb", **here).run_id
    held_out = LossTexts(texts, sequences=4, max_tokens=32)
    assert replace(step, text=None, held_out=held_out).run(tmp_path / "s.duckdb", **here).run_id == run_id
    asked = "SELECT count(*) AS answers, count(DISTINCT arm_id) AS arms FROM answers WHERE task = 'text'"
    assert {Path(chunk.document).suffix for chunk in text.chunks} == {".txt"}  # short documents are one block each
    with pytest.raises(HeadscanError, match="`max_tokens=1` is below"):
        HeldOutText.of_corpus(CorpusSpec(str(corpus_folder)), spec, max_tokens=1)
    assert Store(tmp_path / "s.duckdb").query(asked).to_pylist() == [{"answers": 8, "arms": 2}]


def test_texts_of_a_notebook_are_held_out_text(spec: ModelSpec, corpus_folder: Path) -> None:
    given = [path.read_text("utf-8") for path in sorted(corpus_folder.glob("*.txt"))]
    text = HeldOutText.of_texts(given, spec, max_tokens=32)
    read = HeldOutText.of_corpus(CorpusSpec(str(corpus_folder)), spec, sequences=1000, max_tokens=32)
    assert {chunk.ids for chunk in text.chunks} == {chunk.ids for chunk in read.chunks}
    assert {chunk.document for chunk in text.chunks} <= {f"text {number}" for number in range(1, len(given) + 1)}
    with pytest.raises(HeadscanError, match=r"^`texts` is one text: 'a text'. Pass a list of texts$"):
        HeldOutText.of_texts("a text", spec)
    with pytest.raises(HeadscanError, match="gave no sequence"):
        HeldOutText.of_texts(["short"], spec)


def test_every_measuring_step_fills_its_table(
    spec: ModelSpec, corpus_folder: Path, here: dict[str, Any], tmp_path: Path
) -> None:
    """The same call again measures nothing."""
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    measuring = (
        Importance(spec, texts, TokenConfig(64)),
        Probe(spec, ("induction_score",), probe=BehaviourProbe(sequences=2, tokens=8)),
        Gates(spec, texts, GateFitConfig(share=0.3, steps=4), sequences=8, max_tokens=32),
    )
    found: list[Any] = [step.run(store, **here) for step in measuring]
    again: list[Any] = [step.run(store, **here) for step in measuring]
    assert [each.run_id for each in again] == [each.run_id for each in found]
    assert not any(each.already_done for each in found) and all(each.already_done for each in again)
    for result, name in zip(found, ("importance", "induction_score", "gate"), strict=True):
        assert len(head_order(Store(store), result.run_id, name)) == 18


def test_ablate_sweep_and_referee_judge_their_arms(
    spec: ModelSpec, corpus_folder: Path, evaluation: Evaluate, here: dict[str, Any], tmp_path: Path
) -> None:
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    effects = Ablate(spec, evaluation.tasks).run(store, **here).effects
    assert len(effects) == 18
    sweeping = Sweep(
        spec,
        evaluation.tasks,
        None,
        scores=("entropy",),
        shares=(0.2,),
        mask_criteria=("effect",),
        controls=0,
        confirm=False,
    )
    swept = sweeping.run(store, **here)
    assert [arm.name.partition(" of ")[0] for arm in swept.verdict.arms] == ["rule entropy 20%", "mask effect 20%"]
    assert {choice.verdict.name for choice in swept.choices} == {arm.name for arm in swept.verdict.arms}
    assert not any(choice.confirmed for choice in swept.choices)
    confirmed = replace(sweeping, confirm=True).run(store, **here)
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
    comparing = Referee(
        spec,
        evaluation.tasks,
        None,
        compared=CriteriaComparison(("importance", "importance_recall"), (0.5,), controls=0),
        texts=PruneTexts(texts, sequences=6, max_tokens=200),
    )
    compared = comparing.run(store, **here)
    assert [arm.name.partition(" of ")[0] for arm in compared.arms] == ["importance 50%", "importance_recall 50%"]


def test_labelled_examples_judge_the_heads_of_a_classifier(
    labelled: Ablate, here: dict[str, Any], tmp_path: Path
) -> None:
    store = tmp_path / "s.duckdb"
    run_id = Importance(labelled.model, data=labelled.data).run(store, **here).run_id
    assert len(head_order(Store(store), run_id, "importance")) == LAYERS * HEADS
    assert len(labelled.run(store, **here).effects) == LAYERS * HEADS
    compared = CriteriaComparison(("importance",), (0.5,), controls=0)
    (point,) = Referee(labelled.model, data=labelled.data, compared=compared).run(store, **here).points
    assert (point.curve[0], point.share) == ("importance", 0.5)


def test_prune_takes_the_order_of_a_criterion_from_the_store(
    spec: ModelSpec, corpus_folder: Path, here: dict[str, Any], tmp_path: Path
) -> None:
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    step = Prune(
        spec,
        out=tmp_path / "smaller",
        share=0.2,
        methods=("output_norm_ln",),
        texts=PruneTexts(texts, sequences=4, max_tokens=64),
        repair=RepairChoice("none"),
        timing=None,
        skip_verdict=True,
    )
    with pytest.raises(HeadscanError, match="there is no store at"):
        step.run(store, **here)
    run_id = Scan(spec, texts, TokenConfig(64)).run(store, **here).run_id
    with pytest.raises(HeadscanError, match="has no scan run none"):
        replace(step, run_id="none").run(store, **here)
    (built,) = replace(step, run_id=run_id[:6]).run(store, **here).models
    first = head_order(Store(store), run_id, "output_norm_ln")[: len(built.removed)]
    assert built.removed == tuple(sorted((each.layer, each.head) for each in first)) and len(first) == 4


def test_heads_to_remove_come_from_a_mask_or_a_file(
    spec: ModelSpec, corpus_folder: Path, here: dict[str, Any], tmp_path: Path
) -> None:
    store, heads = tmp_path / "s.duckdb", ((0, 1), (2, 3))
    texts = CorpusSpec(str(corpus_folder))
    run_id = Scan(spec, texts, TokenConfig(64)).run(store, **here).run_id
    Store(store).add_mask("mine", heads, run_id=run_id)
    (tmp_path / "heads.json").write_text(json.dumps(heads))
    step = Prune(
        spec,
        out=tmp_path / "by-hand",
        heads=heads,
        texts=PruneTexts(texts, sequences=4, max_tokens=64),
        repair=RepairChoice("none"),
        timing=None,
        skip_verdict=True,
    )
    named = {"mask": "mine", "import_heads": str(tmp_path / "heads.json"), "masks": {"mine": heads}}
    for name, given in named.items():
        (built,) = replace(step, out=tmp_path / name, heads=(), **{name: given}).run(store, **here).models
        assert built.removed == heads and built.folder == tmp_path / name
    (built,) = step.run(store, **here).models
    assert (built.removed, built.method) == (heads, "heads")


def test_what_is_exported() -> None:
    exported = [getattr(headscan, name) for name in dir(headscan)]
    steps = [each for each in exported if isinstance(each, type) and issubclass(each, Step)]
    assert len(steps) == 12
    results = {each.execute.__annotations__["return"] for each in steps}
    assert results - {"Any"} <= set(dir(headscan))  # a referee has two
    assert get_type_hints(headscan.JobOptions) == get_type_hints(open_run._Checked)


def test_generate_returns_both_texts(spec: ModelSpec, here: dict[str, Any]) -> None:
    plan = plan_for(model_of(spec, headscan.load(spec.source)), 5)
    step = Generate(spec, prompt="a text to continue " * 4, plan=plan, max_new_tokens=6)
    found = step.run(**here)
    tokenizer = identify(spec).tokenizer
    assert found.prompt_tokens == len(tokenizer(step.prompt)["input_ids"])
    for one in (found.full, found.planned):
        assert len(one.tokens) == 6 and one.text == tokenizer.decode(list(one.tokens))
    assert found.planned.cache_bytes < found.full.cache_bytes
    with pytest.raises(HeadscanError, match=r"^`plan=3` is no HeadPlan\. Read it with load_plan$"):
        replace(step, plan=3)


@pytest.mark.parametrize("option", [{"resume_anyway": True}, {"lock_timeout": 5.0}, {"lock_timeout": 0.0}])
def test_a_step_without_a_store_cannot_resume(option: dict[str, Any], spec: ModelSpec) -> None:
    plan = plan_for(model_of(spec, headscan.load(spec.source)), 5)
    for step in (Generate(spec, prompt="a text", plan=plan), Plan(spec, method="measured", corpus="texts/")):
        with pytest.raises(HeadscanError, match=rf"^`{min(option)}` has no effect without a store: leave it out$"):
            step.run(None, **option)


def test_faults_of_stores_are_errors_of_the_store(spec: ModelSpec, tmp_path: Path) -> None:
    step = Scan(spec, CorpusSpec("python-stdlib"), TokenConfig(40))
    with pytest.raises(StoreError, match=r"^`lock_timeout=-1` \(limit 0\)\. Raise `lock_timeout`$"):
        step.run(tmp_path / "s.duckdb", lock_timeout=-1)
    with pytest.raises(StoreMissingError, match=r"there is no store at .*none.duckdb"):
        headscan.open_store(tmp_path / "none.duckdb")
