"""Settings and options of jobs: what is refused, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

import headscan
from headscan import jobs
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, PruningError, UnknownNameError
from headscan.model_spec import ModelSpec
from headscan.options import FieldType, Limits, field_hint, field_type
from headscan.pruning.selection_settings import SelectionConfig
from headscan.settings.evaluation_settings import CriteriaComparison
from headscan.steps.prune.pruning_units import BytesBudget, ShareBudget
from headscan.study.study_config import read_study, write_study
from headscan.texts import CorpusSpec, TokenConfig
from headscan.texts.held_out_text import HeldOutText, TextChunk
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.sources import public_names

#: Texts of a pruning.
TEXTS = jobs.PruneTexts(CorpusSpec("texts/"))


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


def test_a_referee_refuses_to_remove_all_heads(evaluation: jobs.EvaluateConfig) -> None:
    with pytest.raises(InterventionError, match=r"`shares=1` \(limit below 1\)"):
        jobs.RefereeConfig(evaluation, CriteriaComparison(shares=(0.5, 1.0)), texts=TEXTS)


def test_unknown_methods_of_a_pruning_are_refused(evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    config = jobs.PruneConfig(evaluation, tmp_path, (ShareBudget(0.3),), texts=TEXTS)
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
        jobs.PruneConfig(evaluation, tmp_path, **{"budgets": (ShareBudget(0.3),), "texts": TEXTS, **settings})


@pytest.mark.parametrize("heads", [(3, 5), ("3:5",), ((1.5, 2),), ((0, -1),)])
def test_heads_of_arms_and_prunings_are_pairs_of_indices(
    heads: Any, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of "):
        jobs.ChosenArms(heads=heads)
    with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of "):
        jobs.PruneConfig(evaluation, tmp_path, heads={"mine": heads}, texts=TEXTS)
    with pytest.raises(PruningError, match=r"^`heads` of 'mine' are empty \(limit 1 head\)"):
        jobs.PruneConfig(evaluation, tmp_path, heads={"mine": ()}, texts=TEXTS)


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
        jobs.PruneConfig(evaluation, tmp_path, (ShareBudget(0.3),), texts=TEXTS, **settings)


def test_a_size_of_the_cache_needs_units_that_free_it(evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    budgets = (ShareBudget(0.3), BytesBudget(1000, 64))
    with pytest.raises(PruningError, match="`kv_bytes` with `unit=head`: single query heads free no KV cache"):
        jobs.PruneConfig(evaluation, tmp_path, budgets, texts=TEXTS)
    assert jobs.PruneConfig(evaluation, tmp_path, budgets, unit="group", texts=TEXTS).budgets == budgets


def test_the_output_folder_of_models_and_studies_is_a_path_or_a_text(
    spec: ModelSpec, evaluation: jobs.EvaluateConfig, tmp_path: Path
) -> None:
    for make in (
        lambda out: jobs.PruneConfig(evaluation, out, (ShareBudget(0.3),), texts=TEXTS),
        lambda out: jobs.StudyConfig(spec, CorpusSpec("texts/"), out),
    ):
        assert make(tmp_path) == make(str(tmp_path)) and make(str(tmp_path)).out == tmp_path


def test_paths_in_settings_become_texts(spec: ModelSpec, tmp_path: Path) -> None:
    for make in (
        ModelSpec,
        CorpusSpec,
        jobs.ExamplesSpec,
        lambda path: jobs.TaskConfig(include_path=path),
        lambda path: jobs.ChosenArms(models=(path,)),
    ):
        assert repr(make(tmp_path)) == repr(make(str(tmp_path)))  # type: ignore[operator]
    config = jobs.StudyConfig(ModelSpec(Path(spec.source)), CorpusSpec(tmp_path), tmp_path)  # type: ignore[arg-type]
    write_study(tmp_path / "study.yaml", config)
    assert read_study(tmp_path / "study.yaml") == config


def test_settings_without_effect_are_refused(spec: ModelSpec, evaluation: jobs.EvaluateConfig, tmp_path: Path) -> None:
    texts, text = CorpusSpec("texts/"), HeldOutText("texts", (TextChunk("a.txt", (1, 2), 2),))
    heads, sizes = {"heads": {"mine": ((0, 0),)}}, {"budgets": (ShareBudget(0.3),)}

    def pruning(asked: jobs.EvaluateConfig = evaluation, **settings: Any) -> jobs.PruneConfig:
        return jobs.PruneConfig(asked, tmp_path, **settings, texts=TEXTS)

    limited = replace(evaluation, max_loss=0.5)
    pruning(limited, **sizes)
    pruning(**sizes, controls=0, skip_verdict=True)
    jobs.SweepConfig(replace(limited, text=text))
    cases: tuple[tuple[str, Callable[[], object]], ...] = (
        ("`evaluation.text` has no effect on a pruning", lambda: pruning(replace(evaluation, text=text), **sizes)),
        (
            "`evaluation.text` has no effect on a referee",
            lambda: jobs.RefereeConfig(replace(evaluation, text=text), texts=TEXTS),
        ),
        ("`methods` has no effect without `budgets`", lambda: pruning(**heads, methods=("random",))),
        (
            "`selection` has no effect",
            lambda: pruning(**heads, selection=SelectionConfig(curve_tokens=1024), skip_verdict=True),
        ),
        ("`controls=3` has no effect with `skip_verdict`", lambda: pruning(**sizes, controls=3, skip_verdict=True)),
        ("`evaluation.max_loss` has no effect on single heads", lambda: jobs.AblateConfig(limited)),
        ("`max_loss` has no effect without `text`", lambda: jobs.SweepConfig(limited)),
        ("`max_loss` has no effect without `text`", lambda: jobs.evaluate(limited, tmp_path / "s.duckdb", [])),
        ("`texts` has no effect with `kind=zero`", lambda: jobs.ReplacementConfig(texts=8)),
        ("`samples` has no effect with `kind=mean`", lambda: jobs.ReplacementConfig("mean", texts, samples=4)),
        ("`seed` has no effect with `kind=mean`", lambda: jobs.ReplacementConfig("mean", texts, seed=1)),
        ("`texts` has no effect with `kind=resample`", lambda: jobs.ReplacementConfig("resample", texts, texts=8)),
        ("`limit` has no effect without tasks", lambda: jobs.TaskConfig(limit=8)),
        ("`mmlu_cloze` has no effect without tasks", lambda: jobs.TaskConfig(mmlu_cloze=True)),
        (
            "`criteria` has no effect without `shares`",
            lambda: jobs.StudyConfig(spec, texts, criteria=("entropy",), shares=()),
        ),
        (
            "`recent` has no effect without `window_shares`",
            lambda: jobs.StudyConfig(spec, texts, recent=9, window_shares=()),
        ),
        (
            "`search` has no effect without `window_shares`",
            lambda: jobs.StudyConfig(spec, texts, search=True, window_shares=()),
        ),
    )
    for message, make in cases:
        with pytest.raises(HeadscanError, match=f"^{message}.*: .*leave "):
            make()


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
    texts, tokens, examples = CorpusSpec("python-stdlib"), TokenConfig(64), jobs.ExamplesSpec("examples.tsv")
    labelled = jobs.LabelledEvaluateConfig(spec, examples)
    needed: dict[str, tuple[Any, ...]] = {
        "AblateConfig": (evaluation,),
        "BytesBudget": (1000, 64),
        "CorpusSpec": ("python-stdlib",),
        "ExamplesSpec": ("examples.tsv",),
        "EvaluateConfig": (spec, evaluation.tasks),
        "ExportConfig": ("gguf", tmp_path / "x", spec),
        "GatesConfig": (spec, texts),
        "GenerateConfig": (spec, plan_for(model_of(spec, headscan.load(spec.source)), 2), "text"),
        "ImportanceConfig": (spec, texts, tokens),
        "KVBytes": (1000, 64),
        "LabelledAblateConfig": (labelled,),
        "LabelledEvaluateConfig": (spec, examples),
        "LabelledImportanceConfig": (spec, examples),
        "LossBudget": (0.1,),
        "LossLimit": (0.1,),
        "LossTexts": (texts,),
        "ModelSpec": ("demo",),
        "Part": (1, 2),
        "PlanConfig": (spec, texts),
        "ProbeConfig": (spec,),
        "PruneConfig": (evaluation, tmp_path, (ShareBudget(0.3),)),
        "RefereeConfig": (evaluation,),
        "ScanConfig": (spec, texts, tokens),
        "ShareBudget": (0.3,),
        "LabelledRefereeConfig": (labelled, jobs.CriteriaComparison(("importance",))),
        "StudyConfig": (spec, texts),
        "PruneTexts": (texts,),
        "SweepConfig": (evaluation,),
        "TokenConfig": (64,),
        "WindowHeads": (2,),
        "WindowShare": (0.5,),
    }
    classes = {name: getattr(jobs, name) for name in public_names(jobs) if name not in RECORDS | {"BASELINE"}}
    named: dict[str, dict[str, Any]] = {name: {"texts": TEXTS} for name in ("PruneConfig", "RefereeConfig")}
    return {
        name: cls(*needed.get(name, ()), **named.get(name, {})) for name, cls in classes.items() if is_dataclass(cls)
    }


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
    assert {"LabelledAblateConfig.modes", "LabelledEvaluateConfig.metric"} <= literals
    assert {"TaskConfig.names", "CriteriaComparison.criteria", "PruneConfig.methods"} <= tuples


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


def test_an_option_that_jobs_lack_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    config = jobs.ScanConfig(spec, CorpusSpec("python-stdlib"), TokenConfig(64))
    with pytest.raises(TypeError, match=r"unknown option 'here'. Choose from devices, .*, ray_address"):
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
    labelled: jobs.LabelledEvaluateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a file was read")

    for reader in (
        "jobs.job_functions.identify",
        "texts.labelled_texts.read_labelled",
        "jobs.job_functions.ModelOpener",
    ):
        monkeypatch.setattr(f"headscan.{reader}", read)
    store = tmp_path / "s.duckdb"
    with pytest.raises(HeadscanError, match=message):
        jobs.scan(jobs.ScanConfig(labelled.model, CorpusSpec("python-stdlib"), TokenConfig(64)), store, **options)
    with pytest.raises(HeadscanError, match=message):
        jobs.labelled_ablate(jobs.LabelledAblateConfig(labelled), store, **options)


def test_placements_and_options_that_exclude_each_other_are_refused_when_they_are_made() -> None:
    with pytest.raises(HeadscanError, match=r"^`stages` is only for `placement=pipeline`\. Leave out one of the two$"):
        jobs.PlacementRequest("whole", stages=2)
