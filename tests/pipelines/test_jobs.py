"""The jobs as functions, and their rows as relations."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import duckdb
import pytest
from pydantic.fields import FieldInfo

import headscan
from headscan.analysis.errors import StoreMissingError
from headscan.analysis.plans import WindowShare
from headscan.analysis.store.store import Store
from headscan.architectures import HEADS, LAYERS
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, PruningError, UnknownNameError
from headscan.gates.gate_settings import GateFitConfig
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.options import FieldType, Limits, field_hint, field_type
from headscan.pipelines import job_functions, jobs
from headscan.pipelines.cli.main import main
from headscan.pipelines.corpora import CorpusSpec, TokenPlan
from headscan.pipelines.evaluate.held_out_text import HeldOutText, TextChunk
from headscan.pipelines.pruning.pruning_units import BytesBudget, ShareBudget
from headscan.pipelines.runs import run_context
from headscan.pipelines.runs.head_orders import head_order
from headscan.pipelines.runs.model_identity import identify
from headscan.pipelines.settings.evaluation_settings import TASK_TOKENS, Comparison, TaskConfig
from headscan.pipelines.settings.saving_settings import TextConfig
from tests.pipelines.ablate.labelled_models import LABELLED, save_classifier, write_lines
from tests.pipelines.kv.kv_plans import model_of, plan_for
from tests.sources import public_names


def quiet(line: str) -> None:
    pass


@pytest.fixture
def evaluation(spec: ModelSpec, task_folder: Path) -> jobs.EvaluateConfig:
    return jobs.EvaluateConfig(spec, TaskConfig(("counting",), include_path=str(task_folder), limit=6), recall=None)


@pytest.fixture
def labelled(tmp_path: Path) -> jobs.LabelledConfig:
    examples = write_lines(tmp_path / "d.tsv", LABELLED)
    return jobs.LabelledConfig(ModelSpec(str(save_classifier(tmp_path / "bert"))), jobs.DataSpec(str(examples)))


@pytest.fixture
def cpu() -> jobs.PlacementRequest:
    return jobs.PlacementRequest(device="cpu")


def test_scan_evaluate_and_plan_fill_the_tables(
    spec: ModelSpec, corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    path = tmp_path / "s.duckdb"
    texts = CorpusSpec(str(corpus_folder))
    run_id = jobs.scan(jobs.ScanConfig(spec, texts, TokenPlan(64)), path, devices=cpu, say=quiet).run_id
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
    (points,) = tables.arm_chart().data
    assert list(points.x) == [arm.paired.difference]
    by_score = jobs.ChosenArms(score="output_norm_ln", share=0.2, rule=True, controls=1)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "ggml"}, r"^unknown format 'ggml'\. Choose one of gguf, "),
        ({"model": None}, "^`model` goes with a format of models: give both or neither"),
        ({"plan": "p.json"}, r"^`plan` has no effect on gguf \(only on decilm, layer-types, .*\): leave it out$"),
        ({"format": "layer-types", "type": "f32"}, r"^`type` has no effect on layer-types \(only on gguf\)"),
        (
            {"format": "layer-types", "model": None, "architecture": "ministral"},
            "^`architecture` has no effect without `model`",
        ),
    ],
)
def test_exports_without_effect_are_refused(settings: dict[str, Any], message: str, spec: ModelSpec) -> None:
    with pytest.raises(HeadscanError, match=message):
        jobs.ExportConfig(**{"format": "gguf", "out": "x", "model": spec, **settings})


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


def test_every_measuring_job_fills_its_table(
    spec: ModelSpec, corpus_folder: Path, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    """The same call again measures nothing."""
    store, texts = tmp_path / "s.duckdb", CorpusSpec(str(corpus_folder))
    measuring = jobs.ImportanceConfig(spec, texts, TokenPlan(64))
    probing = jobs.ProbeConfig(spec, ("induction_score",), settings=BehaviourProbe(sequences=2, tokens=8))
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
    sweeping = jobs.SweepConfig(evaluation, ("entropy",), (0.2,), masks=("effect",), seeds=0, confirm=False)
    swept = jobs.sweep(sweeping, store, devices=cpu, say=quiet)
    assert [arm.name.partition(" of ")[0] for arm in swept.verdict.arms] == ["rule entropy 20%", "mask effect 20%"]
    assert {choice.verdict.name for choice in swept.choices} == {arm.name for arm in swept.verdict.arms}
    assert not any(choice.confirmed for choice in swept.choices)
    confirmed = jobs.sweep(replace(sweeping, confirm=True), store, devices=cpu, say=quiet)
    assert confirmed.verdict == swept.verdict and len(confirmed.choices) == 2
    for choice in confirmed.choices:
        assert choice.confirmed and choice.selected_on + choice.verdict.paired.questions == 6
    masked = Store(store).query(
        "SELECT layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE score = 'effect' ORDER BY layer, head"
    )
    least = sorted(effects, key=lambda effect: (effect.harm, effect.layer, effect.head))[:4]
    assert masked.to_pylist() == [
        {"layer": layer, "head": head} for layer, head in sorted((each.layer, each.head) for each in least)
    ]
    comparing = jobs.RefereeConfig(
        evaluation,
        Comparison(("importance", "importance_recall"), (0.5,), seeds=0),
        TextConfig(texts, sequences=6, max_tokens=200),
    )
    compared = jobs.referee(comparing, store, devices=cpu, say=quiet)
    assert [arm.name.partition(" of ")[0] for arm in compared.arms] == ["importance 50%", "importance_recall 50%"]


def test_labelled_examples_judge_the_heads_of_a_classifier(
    labelled: jobs.LabelledConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    store = tmp_path / "s.duckdb"
    measuring = jobs.LabelledImportanceConfig(labelled.model, labelled.data)
    run_id = jobs.labelled_importance(measuring, store, devices=cpu, say=quiet).run_id
    assert len(head_order(Store(store), run_id, "importance")) == LAYERS * HEADS
    ablating = jobs.LabelledAblateConfig(labelled)
    assert len(jobs.labelled_ablate(ablating, store, devices=cpu, say=quiet).effects) == LAYERS * HEADS
    comparing = jobs.SiteRefereeConfig(labelled, Comparison(("importance",), (0.5,), seeds=0))
    (point,) = jobs.labelled_referee(comparing, store, devices=cpu, say=quiet).points
    assert (point.curve[0], point.share) == ("importance", 0.5)


def test_prune_saves_a_model_that_loads(
    corpus_folder: Path, evaluation: jobs.EvaluateConfig, cpu: jobs.PlacementRequest, tmp_path: Path
) -> None:
    config = jobs.PruneConfig(
        evaluation=evaluation,
        out=str(tmp_path / "smaller"),
        budgets=(ShareBudget(0.3),),
        texts=TextConfig(CorpusSpec(str(corpus_folder)), sequences=16, max_tokens=64),
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
        texts=TextConfig(texts, sequences=4, max_tokens=64),
        repair=jobs.RepairChoice("none"),
        timing=None,
        skip_verdict=True,
    )
    with pytest.raises(HeadscanError, match="there is no store at"):
        jobs.prune(config, store, devices=cpu, say=quiet)
    run_id = jobs.scan(jobs.ScanConfig(spec, texts, TokenPlan(64)), store, devices=cpu, say=quiet).run_id
    with pytest.raises(HeadscanError, match="has no scan run none"):
        jobs.prune(replace(config, run_id="none"), store, devices=cpu, say=quiet)
    (built,) = jobs.prune(replace(config, run_id=run_id[:6]), store, devices=cpu, say=quiet).models
    first = head_order(Store(store), run_id, "output_norm_ln")[: len(built.removed)]
    assert built.removed == tuple(sorted((each.layer, each.head) for each in first)) and len(first) == 4


def test_a_referee_refuses_to_remove_all_heads(evaluation: jobs.EvaluateConfig) -> None:
    with pytest.raises(InterventionError, match=r"`shares=1` \(limit below 1\)"):
        jobs.RefereeConfig(evaluation, Comparison(shares=(0.5, 1.0)))


def test_unknown_methods_of_a_pruning_are_refused(evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    config = jobs.PruneConfig(evaluation, tmp_path, (ShareBudget(0.3),))
    with pytest.raises(UnknownNameError, match=r"unknown method 'damge'; did you mean damage\?"):
        replace(config, methods=("damge",))
    replace(config, methods=("mine",), orders={"mine": [(0, 0)]})
    with pytest.raises(HeadscanError, match="`run_id` has no effect without a criterion of a run in `methods`"):
        replace(config, run_id="1a2b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budgets": (ShareBudget(0.1),) * 2}, r"2 models have the folder 'damage-0\.1' \(limit 1\)"),
        ({"budgets": (ShareBudget(0.1), ShareBudget(0.1000000001))}, "2 models have the folder"),
        ({"methods": ("random", "random")}, r"'random-0\.3'"),
        ({"heads": {"damage-0.3": ((0, 0),)}}, "2 models have the folder 'damage-0.3'"),
        ({"heads": {"../x": ((0, 0),)}}, "^'../x' names no folder in `out`"),
        ({"heads": {"..": ((0, 0),)}}, "^'..' names no folder in `out`"),
        ({"methods": ("a/b",), "orders": {"a/b": [(0, 0)]}}, "^'a/b-0.3' names no folder in `out`"),
    ],
)
def test_every_pruned_model_has_a_folder_of_its_own_in_out(
    settings: dict[str, Any], message: str, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    with pytest.raises(PruningError, match=message):
        jobs.PruneConfig(evaluation, tmp_path, **{"budgets": (ShareBudget(0.3),), **settings})


@pytest.mark.parametrize("heads", [(3, 5), ("3:5",), ((1.5, 2),), ((0, -1),)])
def test_heads_of_arms_and_prunings_are_pairs_of_indices(
    heads: Any, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of "):
        jobs.ChosenArms(heads=heads)
    with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of "):
        jobs.PruneConfig(evaluation, tmp_path, heads={"mine": heads})
    with pytest.raises(PruningError, match=r"^`heads` of 'mine' are empty \(limit 1 head\)"):
        jobs.PruneConfig(evaluation, tmp_path, heads={"mine": ()})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": {"mine": 3}}, r"^`heads` of 'mine' are 3\. Pass a tuple of \(layer, head\) pairs$"),
        ({"heads": ((0, 1),)}, r"^`heads=\(\(0, 1\),\)` is no mapping\. Pass \(layer, head\) pairs by name$"),
        ({"orders": {"mine": 3}}, r"^`orders` of 'mine' are 3\."),
        ({"orders": {"mine": [3]}}, r"^not a head: 3\. Pass"),
    ],
)
def test_heads_and_orders_of_prunings_are_lists_by_name(
    settings: dict[str, Any], message: str, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    with pytest.raises(HeadscanError, match=message):
        jobs.PruneConfig(evaluation, tmp_path, (ShareBudget(0.3),), **settings)


def test_a_size_of_the_cache_needs_units_that_free_it(evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    budgets = (ShareBudget(0.3), BytesBudget(1000, 64))
    with pytest.raises(PruningError, match="`kv_bytes` with `unit=head`: single query heads free no KV cache"):
        jobs.PruneConfig(evaluation, tmp_path, budgets)
    assert jobs.PruneConfig(evaluation, tmp_path, budgets, unit="group").budgets == budgets


def test_the_output_folder_of_models_and_studies_is_a_path_or_a_text(
    spec: ModelSpec, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    for make in (
        lambda out: jobs.PruneConfig(evaluation, out, (ShareBudget(0.3),)),
        lambda out: jobs.StudyConfig(spec, CorpusSpec("texts/"), out),
    ):
        assert make(tmp_path) == make(str(tmp_path)) and make(str(tmp_path)).out == tmp_path


def test_a_memory_limit_sets_the_batch_size_of_jobs_and_verbs(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb finds the run of the job complete, because both have the same batch size."""
    store, lines = tmp_path / "s.duckdb", list[str]()
    config = jobs.ScanConfig(jobs.ModelSpec("demo"), CorpusSpec(str(corpus_folder)), TokenPlan(64))
    limited = jobs.PlacementRequest(device="cpu", memory=64 << 20)
    run_id = jobs.scan(config, store, devices=limited, say=lines.append).run_id
    (run,) = Store(store).runs()
    assert 64 <= run["config"]["batch_tokens"] < config.batch_tokens
    assert lines[0].startswith("placement: streamed, on cpu within 0.06 GiB")
    words = ["scan", "demo", "--corpus", str(corpus_folder), "--max-tokens", "64", "--device", "cpu"]
    assert main([*words, "--memory", "64MiB", "--store", str(store)]) == 0
    assert f"run {run_id} is complete" in capsys.readouterr().out


def numbers_of(cls: Any) -> dict[str, tuple[FieldType, tuple[Any, ...]]]:
    """Return type and marks of the fields of a class that hold numbers."""
    numbers = {}
    for name in (each.name for each in fields(cls)):
        hint = field_hint(cls, name)
        hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kind = field_type(hint)
        if kind.kind in (int, float):
            numbers[name] = kind, tuple(mark for mark in marks if isinstance(mark, (Limits, FieldInfo)))
    return numbers


#: Exported dataclasses that jobs make; users may make arms and held-out text, too.
RECORDS = {
    "Arm",
    "ArmVerdict",
    "BuiltModel",
    "CorpusRunResult",
    "Exported",
    "GatesResult",
    "Generated",
    "GenerationComparison",
    "HeadEffect",
    "HeadPlan",
    "HeldOutText",
    "PairedDifference",
    "ProbeResult",
    "PruneResult",
    "Saving",
    "ShareVerdict",
    "SitePoint",
    "StudyAnswer",
    "SweepChoice",
    "SweepResult",
    "Verdict",
}


@pytest.fixture
def all_settings(spec: ModelSpec, evaluation: jobs.EvaluateConfig, tmp_path: Path) -> dict[str, Any]:
    """Settings of every exported class by its name."""
    texts, tokens, examples = CorpusSpec("python-stdlib"), TokenPlan(64), jobs.DataSpec("examples.tsv")
    labelled = jobs.LabelledConfig(spec, examples)
    needed: dict[str, tuple[Any, ...]] = {
        "AblateConfig": (evaluation,),
        "BytesBudget": (1000, 64),
        "CorpusSpec": ("python-stdlib",),
        "DataSpec": ("examples.tsv",),
        "EvaluateConfig": (spec, evaluation.tasks),
        "ExportConfig": ("gguf", tmp_path / "x", spec),
        "GatesConfig": (spec, texts),
        "GenerateConfig": (spec, plan_for(model_of(spec, headscan.load(spec.source)), 2), "text"),
        "ImportanceConfig": (spec, texts, tokens),
        "KVBytes": (1000, 64),
        "LabelledAblateConfig": (labelled,),
        "LabelledConfig": (spec, examples),
        "LabelledImportanceConfig": (spec, examples),
        "LossBudget": (0.1,),
        "LossLimit": (0.1,),
        "LossTexts": (texts,),
        "ModelSpec": ("demo",),
        "Part": (1, 2),
        "PlanConfig": (spec,),
        "ProbeConfig": (spec,),
        "PruneConfig": (evaluation, tmp_path, (ShareBudget(0.3),)),
        "RefereeConfig": (evaluation,),
        "ScanConfig": (spec, texts, tokens),
        "ShareBudget": (0.3,),
        "SiteRefereeConfig": (labelled, jobs.Comparison(("importance",))),
        "StudyConfig": (spec, texts),
        "SweepConfig": (evaluation,),
        "TokenPlan": (64,),
        "WindowHeads": (2,),
        "WindowShare": (0.5,),
    }
    classes = {name: getattr(jobs, name) for name in public_names(jobs) if name not in RECORDS | {"BASELINE"}}
    return {name: cls(*needed.get(name, ())) for name, cls in classes.items() if is_dataclass(cls)}


def assert_refused(settings: Any, field: str, value: object) -> None:
    """Assert that settings refuse the value of a field on one line that begins with the field's name, or with the noun
    for a name that is one of many.
    """
    message = rf"^(`|{type(settings).__name__}\.){field}\b|^unknown plan mode "
    with pytest.raises(HeadscanError, match=message) as refused:
        replace(settings, **{field: value})
    assert "\n" not in str(refused.value)


def test_every_number_of_the_settings_has_limits_and_a_bad_one_is_named(all_settings: dict[str, Any]) -> None:
    unlimited, checked = set(), 0
    for name, settings in all_settings.items():
        for field, (kind, marks) in numbers_of(type(settings)).items():
            if not marks:
                unlimited.add(f"{name}.{field}")
                continue
            low: float = float("nan") if kind.kind is float else -1
            for bad in ("many", low):
                assert_refused(settings, field, (bad,) if kind.many else bad)
            checked += 1
    assert not unlimited and checked >= 50


def test_every_literal_refuses_an_unknown_word_and_every_tuple_a_text(all_settings: dict[str, Any]) -> None:
    literals, tuples = set(), set()
    for name, settings in all_settings.items():
        for field in (each.name for each in fields(settings)):
            hint = field_hint(type(settings), field)
            kind = field_type(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
            if kind.many:
                tuples.add(f"{name}.{field}")
                assert_refused(settings, field, "mmlu")
                assert_refused(settings, field, b"mmlu")
            if kind.choices:
                literals.add(f"{name}.{field}")
                assert_refused(settings, field, ("unknown",) if kind.many else "unknown")
    assert {"PruneConfig.unit", "PlanConfig.granularity", "StudyConfig.prune_by", "AblateConfig.modes"} <= literals
    assert {"LabelledAblateConfig.modes", "LabelledConfig.metric"} <= literals
    assert {"TaskConfig.names", "Comparison.criteria", "PruneConfig.methods"} <= tuples


def test_settings_refuse_what_is_not_of_the_class_of_a_field(all_settings: dict[str, Any], spec: ModelSpec) -> None:
    checked = set()
    for name, settings in all_settings.items():
        for field in (each.name for each in fields(settings)):
            hint = field_hint(type(settings), field)
            kind = field_type(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
            if kind.cls is not None:
                checked.add(f"{name}.{field}")
                assert_refused(settings, field, (512,) if kind.many else 512)
                if not kind.optional:
                    assert_refused(settings, field, (None,) if kind.many else None)
    assert {"ScanConfig.tokens", "EvaluateConfig.tasks", "PruneConfig.budgets", "RefereeConfig.compared"} <= checked
    with pytest.raises(HeadscanError, match=r"^`tasks=\('mmlu',\)` is no TaskConfig\. Pass a TaskConfig$"):
        jobs.EvaluateConfig(spec, ("mmlu",))  # type: ignore[arg-type]
    with pytest.raises(HeadscanError, match=r"^`budgets=0\.4` .* Pass a ShareBudget or a BytesBudget or a LossBudget$"):
        replace(all_settings["PruneConfig"], budgets=(0.4,))


def test_the_results_of_all_jobs_are_exported() -> None:
    functions = [getattr(jobs, name) for name in public_names(jobs) if name.islower() and name != "mask_arm"]
    names = vars(job_functions) | vars(jobs) | {"BudgetRequest": None}
    assert {get_type_hints(each, names)["return"].__name__ for each in functions} <= public_names(jobs)


class Begun(Exception):
    """A job has begun."""


@pytest.mark.parametrize(
    ("job", "does"),
    [
        ("scan", "measure.run_scan.run_scan"),
        ("importance", "measure.run_importance.run_importance"),
        ("probe", "measure.run_probe.run_probe"),
        ("gates", "measure.run_gates.run_gates"),
        ("ablate", "ablate.single_heads.run_ablate"),
        ("labelled_importance", "measure.run_importance.run_labelled_importance"),
        ("labelled_ablate", "ablate.labelled_arms.run_labelled_ablate"),
        ("labelled_referee", "referee.site_referee.run_labelled_referee"),
        ("evaluate", "evaluate.run_evaluation.run_evaluation"),
        ("sweep", "evaluate.run_sweep.run_sweep"),
        ("referee", "referee.run_referee.run_referee"),
        ("plan", "kv.measured_plan.run_plan"),
        ("prune", "pruning.run_prune.run_prune"),
        ("study", "study.run_study.run_study"),
    ],
)
def test_the_batch_size_of_the_devices_reaches_every_job(
    job: str,
    does: str,
    evaluation: jobs.EvaluateConfig,
    labelled: jobs.LabelledConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, texts, store = evaluation.model, CorpusSpec("python-stdlib"), tmp_path / "s.duckdb"
    calls: dict[str, tuple[Any, ...]] = {
        "scan": (jobs.ScanConfig(spec, texts, TokenPlan(64)), store),
        "importance": (jobs.ImportanceConfig(spec, texts, TokenPlan(64)), store),
        "probe": (jobs.ProbeConfig(spec), store),
        "gates": (jobs.GatesConfig(spec, texts), store),
        "ablate": (jobs.AblateConfig(evaluation), store),
        "labelled_importance": (jobs.LabelledImportanceConfig(labelled.model, labelled.data), store),
        "labelled_ablate": (jobs.LabelledAblateConfig(labelled), store),
        "labelled_referee": (jobs.SiteRefereeConfig(labelled, Comparison(("importance",))), store),
        "evaluate": (evaluation, store, []),
        "sweep": (jobs.SweepConfig(evaluation, ("entropy",), (0.2,)), store),
        "referee": (jobs.RefereeConfig(evaluation, texts=TextConfig(texts, max_tokens=64)), store),
        "plan": (jobs.PlanConfig(spec, texts, max_tokens=128), store, WindowShare(0.5)),
        "prune": (
            jobs.PruneConfig(evaluation=evaluation, out=tmp_path / "smaller", budgets=(ShareBudget(0.3),)),
            store,
        ),
        "study": (jobs.StudyConfig(spec, texts, str(tmp_path / "study")),),
    }
    assert calls.keys() == {name for name in public_names(jobs) if name.islower()} - {"mask_arm", "export", "generate"}
    received = list[Any]()

    def begun(*arguments: Any, **_: Any) -> None:
        received.append(arguments[0])
        raise Begun

    monkeypatch.setattr(f"headscan.pipelines.{does}", begun)
    with pytest.raises(Begun):
        getattr(jobs, job)(*calls[job], devices=jobs.PlacementRequest(device="cpu", batch_tokens=640), say=quiet)
    (settings,) = received
    # The settings of the job themselves, or those of its evaluation, fit or labelled examples.
    parts = (getattr(settings, part, None) for part in ("evaluation", "fit", "judging"))
    sized = next(filter(None, parts), settings)
    assert sized.batch_tokens == 640


def test_gates_are_placed_for_the_steps_of_their_fit(
    corpus_folder: Path, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb and the job pass the tokens of a step to the opener."""
    placed = list[int]()

    def opener(model: ModelSpec, tokens: int, request: jobs.PlacementRequest, batch_tokens: int, **_: object) -> None:
        placed.append(batch_tokens)
        raise HeadscanError("placed")

    monkeypatch.setattr(run_context, "ModelOpener", opener)
    monkeypatch.setattr(job_functions, "ModelOpener", opener)
    config = jobs.GatesConfig(spec, CorpusSpec(str(corpus_folder)), GateFitConfig(batch_tokens=256))
    with pytest.raises(HeadscanError, match="placed"):
        jobs.gates(config, tmp_path / "s.duckdb", say=quiet)
    words = ["gates", "demo", "--corpus", str(corpus_folder), "--step-tokens", "256"]
    assert main([*words, "--store", str(tmp_path / "s.duckdb")]) == 2
    assert placed == [256, 256]


def test_jobs_that_remove_heads_need_one_whole_replica(evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    config = jobs.PruneConfig(evaluation=evaluation, out=tmp_path / "smaller", budgets=(ShareBudget(0.3),))
    for devices, message in (
        (jobs.PlacementRequest(device="cpu", replicas=2), r"`replicas=2` \(limit 1 for this job\)"),
        (jobs.PlacementRequest(device="cpu", placement="streamed"), "the removal of heads needs all layers"),
    ):
        with pytest.raises(HeadscanError, match=message):
            jobs.prune(config, tmp_path / "s.duckdb", devices=devices, say=quiet)
    with pytest.raises(HeadscanError, match=r"^`ray_address=auto`: this job runs in one process\. Leave out .*$"):
        jobs.prune(config, tmp_path / "s.duckdb", ray_address="auto", say=quiet)


@pytest.fixture
def placing(evaluation: jobs.EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on a model with 8,192 positions fail with the tokens for which they are placed."""

    def opener(model: ModelSpec, tokens: int, *_: object, **__: object) -> None:
        raise HeadscanError(f"placed for {tokens} tokens")

    identity = replace(identify(evaluation.model), max_tokens=8192)
    monkeypatch.setattr(job_functions, "identify", lambda model: identity)
    monkeypatch.setattr(job_functions, "ModelOpener", opener)


@pytest.mark.parametrize(("longest", "placed"), [(4096, 4096), (64, TASK_TOKENS)])
def test_pruning_has_memory_for_its_longest_text(
    longest: int, placed: int, evaluation: jobs.EvaluateConfig, placing: None, tmp_path: Path
) -> None:
    texts = TextConfig(CorpusSpec("python-stdlib"), max_tokens=longest)
    config = jobs.PruneConfig(evaluation, tmp_path / "smaller", budgets=(ShareBudget(0.3),), texts=texts)
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.prune(config, tmp_path / "s.duckdb", say=quiet)


@pytest.mark.parametrize(
    ("recall", "text", "placed"),
    [
        (None, 64, TASK_TOKENS),
        (None, 3000, 3000),
        (jobs.RecallPlan(), None, 4096),
        (jobs.RecallPlan((256, 6000)), 3000, 6000),
    ],
)
def test_evaluations_have_memory_for_recall_and_held_out_text(
    recall: jobs.RecallPlan | None,
    text: int | None,
    placed: int,
    evaluation: jobs.EvaluateConfig,
    placing: None,
    tmp_path: Path,
) -> None:
    held_out = None if text is None else HeldOutText("a corpus", (TextChunk("a.txt", (1,) * text, text),))
    asked = replace(evaluation, recall=recall, text=held_out)
    store = tmp_path / "s.duckdb"
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.evaluate(asked, store, [], say=quiet)
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.sweep(jobs.SweepConfig(asked), store, say=quiet)
    pruned = jobs.PruneConfig(asked, tmp_path / "smaller", budgets=(ShareBudget(0.3),))
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.prune(pruned, store, say=quiet)
    with pytest.raises(HeadscanError, match=f"placed for {TASK_TOKENS} tokens"):
        jobs.prune(replace(pruned, skip_verdict=True), store, say=quiet)


@pytest.mark.parametrize("longest", [3000, 64])
def test_ablate_and_study_have_memory_for_their_texts(
    longest: int, evaluation: jobs.EvaluateConfig, placing: None, tmp_path: Path
) -> None:
    texts = jobs.LossTexts(CorpusSpec("python-stdlib"), max_tokens=longest)
    on_texts = jobs.AblateConfig(replace(evaluation, tasks=TaskConfig()), texts)
    with pytest.raises(HeadscanError, match=f"placed for {longest} tokens"):
        jobs.ablate(on_texts, tmp_path / "s.duckdb", say=quiet)
    with pytest.raises(HeadscanError, match=f"placed for {TASK_TOKENS} tokens"):
        jobs.ablate(jobs.AblateConfig(evaluation), tmp_path / "s.duckdb", say=quiet)
    study = jobs.StudyConfig(evaluation.model, texts.corpus, tmp_path / "study", tokens=longest)
    with pytest.raises(HeadscanError, match=f"placed for {max(TASK_TOKENS, longest)} tokens"):
        jobs.study(study, say=quiet)


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match=r"there is no store at .*none.duckdb"):
        headscan.open_store(tmp_path / "none.duckdb")


def test_an_option_that_jobs_lack_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    config = jobs.ScanConfig(spec, CorpusSpec("python-stdlib"), TokenPlan(64))
    with pytest.raises(TypeError, match=r"unknown option 'here'. Choose from devices, ray_address, .*, say"):
        jobs.scan(config, tmp_path / "s.duckdb", here=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "cuda"}, r"^`devices='cuda'` is no PlacementRequest\. Pass a PlacementRequest$"),
        ({"timeouts": 60}, r"^`timeouts=60` is no Timeouts\."),
        ({"resume_anyway": "yes"}, r"^`resume_anyway='yes'` is not True or False\."),
        ({"ray_address": "first"}, r"^'first' is no address of a Ray cluster: write HOST:PORT, such as first:6379, or"),
        ({"ray_address": 6379}, r"^6379 is no address of a Ray cluster"),
    ],
)
def test_options_are_checked_before_files_are_read(
    options: dict[str, Any],
    message: str,
    labelled: jobs.LabelledConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a file was read")

    for reader in ("job_functions.identify", "measure.labelled_texts.read_labelled", "job_functions.ModelOpener"):
        monkeypatch.setattr(f"headscan.pipelines.{reader}", read)
    store = tmp_path / "s.duckdb"
    with pytest.raises(HeadscanError, match=message):
        jobs.scan(jobs.ScanConfig(labelled.model, CorpusSpec("python-stdlib"), TokenPlan(64)), store, **options)
    with pytest.raises(HeadscanError, match=message):
        jobs.labelled_ablate(jobs.LabelledAblateConfig(labelled), store, **options)


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
    with pytest.raises(HeadscanError, match=r"^`lock_timeout` has no effect on `generate`: leave it out$"):
        jobs.generate(config, lock_timeout=5.0)
    with pytest.raises(HeadscanError, match=r"^`plan='p\.json'` is no HeadPlan\. Read it with load_plan$"):
        replace(config, plan="p.json")


def test_a_plan_without_a_store_cannot_resume(spec: ModelSpec) -> None:
    with pytest.raises(HeadscanError, match=r"^`resume_anyway` has no effect without `store`: leave it out$"):
        jobs.plan(jobs.PlanConfig(spec), None, WindowShare(0.5), resume_anyway=True)


def test_placements_and_options_that_exclude_each_other_are_refused_when_they_are_made() -> None:
    with pytest.raises(HeadscanError, match=r"^`stages` is only for `placement=pipeline`\. Leave out one of the two$"):
        jobs.PlacementRequest("whole", stages=2)
