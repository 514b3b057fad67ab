"""Settings and options of steps: what is refused, and when; batch sizes, and the memory that placements reserve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

import headscan
from headscan import (
    Ablate,
    ChosenArms,
    CorpusSpec,
    CriteriaComparison,
    Evaluate,
    ExamplesSpec,
    ExportConfig,
    GateFitConfig,
    Gates,
    Generate,
    Importance,
    LossTexts,
    ModelSpec,
    PlacementRequest,
    Plan,
    Probe,
    Prune,
    PruneTexts,
    RecallQuestions,
    Referee,
    ReplacementConfig,
    Scan,
    SelectionConfig,
    Study,
    Sweep,
    TaskConfig,
    TokenConfig,
)
from headscan.cli.main import main
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, PruningError, UnknownNameError
from headscan.options import BATCH_TOKENS, Field, Limits, declared_fields
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import TASK_TOKENS, HarnessError
from headscan.steps.step import Step
from headscan.store.store import Store
from headscan.study.study_step import read_study, write_study
from headscan.texts.held_out_text import HeldOutText, TextChunk
from tests.jobs.conftest import quiet
from tests.jobs.steps.kv_plans import model_of, plan_for

#: Texts of a pruning.
TEXTS = PruneTexts(CorpusSpec("texts/"))


@pytest.fixture
def pruning(spec: ModelSpec, tmp_path: Path) -> Callable[..., Prune]:
    """Make a pruning with texts; it has a size unless heads are named."""

    def make(**settings: Any) -> Prune:
        named = settings.keys() & {"share", "shares", "kv_bytes", "max_divergence", "heads", "masks"}
        return Prune(spec, **{"out": tmp_path, "texts": TEXTS, **({} if named else {"share": 0.3}), **settings})

    return make


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "ggml"}, r"^`format='ggml'` is unknown\. Choose gguf or decilm or "),
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
        ExportConfig(**{"format": "gguf", "out": "x", "model": spec, **settings})


def test_methods_and_shares_that_cannot_be_are_refused(pruning: Callable[..., Prune], spec: ModelSpec) -> None:
    step = pruning()
    with pytest.raises(UnknownNameError, match=r"unknown method 'damge'; did you mean damage\?"):
        replace(step, methods=("damge",))
    replace(step, methods=("mine",), orders={"mine": [(0, 0)]})
    with pytest.raises(HeadscanError, match="`run_id` has no effect without a criterion of a run in `methods`"):
        replace(step, run_id="1a2b")
    with pytest.raises(InterventionError, match=r"`shares=1` \(limit below 1\)"):
        Referee(spec, compared=CriteriaComparison(shares=(0.5, 1.0)), texts=TEXTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shares": (0.1, 0.1000000001)}, r"2 models have the folder 'damage-0\.1' \(limit 1\)"),
        ({"methods": ("random", "random")}, r"'random-0\.3'"),
        ({"masks": {"../x": ((0, 0),)}}, "^'../x' names no folder in `out`"),
        ({"masks": {"..": ((0, 0),)}}, "^'..' names no folder in `out`"),
        ({"methods": ("a/b",), "orders": {"a/b": [(0, 0)]}}, "^'a/b-0.3' names no folder in `out`"),
    ],
)
def test_every_pruned_model_has_a_folder_of_its_own_in_out(
    settings: dict[str, Any], message: str, pruning: Callable[..., Prune]
) -> None:
    with pytest.raises(PruningError, match=message):
        pruning(**settings)


def test_a_pruning_has_one_kind_of_size(pruning: Callable[..., Prune], spec: ModelSpec) -> None:
    assert pruning(shares=(0.1, 0.2, 0.1)).budgets == pruning(shares=(0.1, 0.2)).budgets
    with pytest.raises(
        PruningError, match=r"^nothing to prune: 0 sizes \(limit 1\)\. Set one of share, shares, kv_bytes"
    ):
        Prune(spec, out="x", texts=TEXTS)
    with pytest.raises(PruningError, match=r"^`share` and `heads` are two sizes \(limit 1\)\. Leave one of them out$"):
        pruning(share=0.3, heads=((0, 1),))
    for half in ({"kv_bytes": 1000}, {"at": 64}):
        with pytest.raises(PruningError, match=r"^`kv_bytes` and `at` go together"):
            pruning(**half)


@pytest.mark.parametrize("heads", [(3, 5), ("3:5",), ((1.5, 2),), ((0, -1),)])
def test_heads_of_arms_and_prunings_are_pairs_of_indices(heads: Any, pruning: Callable[..., Prune]) -> None:
    for make in (lambda: ChosenArms(heads=heads), lambda: pruning(masks={"mine": heads}), lambda: pruning(heads=heads)):
        with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of "):
            make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masks": {"mine": 3}}, r"^`masks` of 'mine' are 3\. Pass a tuple of \(layer, head\) pairs$"),
        ({"masks": {"mine": ()}}, r"^`masks` of 'mine' are empty \(limit 1 head\)"),
        ({"masks": ((0, 1),)}, r"^`masks=\(\(0, 1\),\)` is no mapping\. Pass \(layer, head\) pairs by name$"),
        ({"orders": {"mine": 3}}, r"^`orders` of 'mine' are 3\."),
        ({"orders": {"mine": [3]}}, r"^not a head: 3\. Pass"),
    ],
)
def test_masks_and_orders_of_prunings_are_lists_by_name(
    settings: dict[str, Any], message: str, pruning: Callable[..., Prune]
) -> None:
    with pytest.raises(HeadscanError, match=message):
        pruning(**settings)


def test_sizes_and_folders_of_a_pruning(pruning: Callable[..., Prune], spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(PruningError, match="`kv_bytes` needs `unit` group or layer: single query heads free no KV"):
        pruning(kv_bytes=1000, at=64, unit="head")
    assert pruning(kv_bytes=1000, at=64).removed_unit == "group"
    assert pruning(kv_bytes=1000, at=64, unit="layer").removed_unit == "layer"
    assert pruning().removed_unit == "head"
    for make in (lambda out: pruning(out=out), lambda out: Study(spec, CorpusSpec("texts/"), out)):
        assert make(tmp_path) == make(str(tmp_path)) and make(str(tmp_path)).out == tmp_path


def test_paths_in_settings_become_texts_and_texts_become_settings(spec: ModelSpec, tmp_path: Path) -> None:
    for make in (
        ModelSpec,
        CorpusSpec,
        ExamplesSpec,
        lambda path: TaskConfig(include_path=path),
        lambda path: ChosenArms(models=(path,)),
    ):
        assert repr(make(tmp_path)) == repr(make(str(tmp_path)))  # type: ignore[operator]
    config = Study(ModelSpec(Path(spec.source)), CorpusSpec(tmp_path), tmp_path)  # type: ignore[arg-type]
    write_study(tmp_path / "study.yaml", config)
    assert read_study(tmp_path / "study.yaml") == config
    assert Study(spec.source, tmp_path, tmp_path) == config  # type: ignore[arg-type]
    for tasks in ("mmlu", ("mmlu",), ["mmlu"]):
        assert Evaluate(spec, tasks).tasks == TaskConfig(("mmlu",))  # type: ignore[arg-type]


def test_settings_without_effect_are_refused(
    spec: ModelSpec, evaluation: Evaluate, pruning: Callable[..., Prune]
) -> None:
    texts, text = CorpusSpec("texts/"), HeldOutText("texts", (TextChunk("a.txt", (1, 2), 2),))
    tasks, heads = evaluation.tasks, {"heads": ((0, 0),)}
    pruning(max_loss=0.5)
    pruning(controls=0, skip_verdict=True)
    pruning(**heads, selection=SelectionConfig(curve_tokens=1024))
    Sweep(spec, tasks, text=text, max_loss=0.5)
    Evaluate(spec, tasks, held_out=LossTexts(texts), max_loss=0.5)
    cases: tuple[tuple[str, Callable[[], object]], ...] = (
        ("`text` has no effect on a pruning", lambda: pruning(text=text)),
        ("`text` has no effect on a referee", lambda: Referee(spec, text=text, texts=TEXTS)),
        ("`text` has no effect on single heads", lambda: Ablate(spec, tasks, text=text)),
        ("`recall` has no effect on single heads", lambda: Ablate(spec, tasks, headscan.RecallQuestions())),
        ("`methods` has no effect on named heads", lambda: pruning(**heads, methods=("random",))),
        ("`kv_counts` has no effect on named heads", lambda: pruning(**heads, kv_counts="divisors")),
        (
            "`curve_tokens` has no effect on named heads without controls",
            lambda: pruning(**heads, selection=SelectionConfig(curve_tokens=1024), skip_verdict=True),
        ),
        ("`controls=3` has no effect with `skip_verdict`", lambda: pruning(controls=3, skip_verdict=True)),
        ("`max_loss` has no effect on single heads", lambda: Ablate(spec, tasks, max_loss=0.5)),
        ("`max_loss` has no effect without `text`", lambda: Sweep(spec, tasks, max_loss=0.5)),
        ("`max_loss` has no effect without `text`", lambda: Evaluate(spec, tasks, max_loss=0.5)),
        ("`texts` has no effect with `kind=zero`", lambda: ReplacementConfig(texts=8)),
        ("`samples` has no effect with `kind=mean`", lambda: ReplacementConfig("mean", texts, samples=4)),
        ("`seed` has no effect with `kind=mean`", lambda: ReplacementConfig("mean", texts, seed=1)),
        ("`texts` has no effect with `kind=resample`", lambda: ReplacementConfig("resample", texts, texts=8)),
        ("`limit` has no effect without `tasks`", lambda: Evaluate(spec, TaskConfig(limit=8))),
        ("`mmlu_cloze` has no effect without `tasks`", lambda: Study(spec, texts, tasks=TaskConfig(mmlu_cloze=True))),
        ("`criteria` has no effect without `shares`", lambda: Study(spec, texts, criteria=("entropy",), shares=())),
        ("`recent` has no effect without `window_shares`", lambda: Study(spec, texts, recent=9, window_shares=())),
        ("`search` has no effect without `window_shares`", lambda: Study(spec, texts, search=True, window_shares=())),
    )
    for message, make in cases:
        with pytest.raises(HeadscanError, match=f"^{message}.*: .*leave "):
            make()


def test_settings_that_exclude_each_other_are_refused(spec: ModelSpec, evaluation: Evaluate) -> None:
    texts, text = CorpusSpec("texts/"), HeldOutText("texts", (TextChunk("a.txt", (1, 2), 2),))
    with pytest.raises(
        HarnessError, match=r"^`text` and `held_out` are two texts \(limit 1\)\. Leave one of them out$"
    ):
        replace(evaluation, text=text, held_out=LossTexts(texts))
    with pytest.raises(
        InterventionError, match=r"^effects have one metric: leave out `data`, or `tasks` and `corpus`$"
    ):
        Ablate(spec, evaluation.tasks, data=ExamplesSpec("examples.tsv"))
    with pytest.raises(InterventionError, match=r"^tasks and texts, but effects have one metric\."):
        Ablate(spec, evaluation.tasks, corpus=texts)


def test_numbers_out_of_range_are_errors_of_their_step(
    spec: ModelSpec, evaluation: Evaluate, pruning: Callable[..., Prune]
) -> None:
    for error, make in (
        (PruningError, lambda: pruning(share=1.5)),
        (InterventionError, lambda: Sweep(spec, evaluation.tasks, controls=-1)),
        (InterventionError, lambda: Ablate(spec, evaluation.tasks, sequences=0)),
        (InterventionError, lambda: Referee(spec, texts=TEXTS, max_loss=-1.0)),
        (HarnessError, lambda: Evaluate(spec, evaluation.tasks, max_loss=-1.0)),
    ):
        with pytest.raises(error, match=r"^`\w+=-?[\d.]+` \(limit "):
            make()


def numbers_of(cls: Any) -> dict[str, tuple[Field, list[Any]]]:
    """Return the fields of a class that hold numbers, with their limits."""
    numbers = (field for field in declared_fields(cls) if field.kind in (int, float))
    return {
        each.name: (each, [mark for mark in each.marks if isinstance(mark, Limits | FieldInfo)]) for each in numbers
    }


#: Exported dataclasses that steps make, that users may make from arms and texts, and those of a model and its heads.
RECORDS = frozenset(
    "Arm ArmVerdict AttentionSite BuiltModel CorpusRunResult Exported GatesResult Generated GenerationComparison "
    "HeadEffect HeadGrid HeadMask HeadMeans HeadPlan HeadRule HeadSamples HeldOutText KeptKeys KvWindows "
    "LoadedModel Needle PairedDifference ProbeResult PruneResult RandomHeads Saving Sharding ShareVerdict SiteMask "
    "SitePoint StudyAnswer SweepChoice SweepResult Verdict Window".split()
)


@pytest.fixture
def all_settings(spec: ModelSpec, evaluation: Evaluate, pruning: Callable[..., Prune]) -> dict[str, Any]:
    """Settings of every exported class by its name."""
    texts, tokens, plan = (
        CorpusSpec("python-stdlib"),
        TokenConfig(64),
        plan_for(model_of(spec, headscan.load(spec.source)), 2),
    )
    needed: dict[str, dict[str, Any]] = {
        "Ablate": {"model": spec, "tasks": evaluation.tasks},
        "CorpusSpec": {"name": "python-stdlib"},
        "Evaluate": {"model": spec, "tasks": evaluation.tasks},
        "ExamplesSpec": {"path": "examples.tsv"},
        "ExportConfig": {"format": "gguf", "out": "x", "model": spec},
        "Gates": {"model": spec, "corpus": texts},
        "Generate": {"model": spec, "prompt": "text", "plan": plan},
        "Importance": {"model": spec, "corpus": texts, "tokens": tokens},
        "KVBytes": {"kv_bytes": 1000, "tokens": 64},
        "LossLimit": {"max_loss": 0.1},
        "LossTexts": {"corpus": texts},
        "ModelSpec": {"source": "demo"},
        "Part": {"number": 1, "of": 2},
        "Plan": {"model": spec, "method": "measured", "corpus": texts},
        "Probe": {"model": spec},
        "PruneTexts": {"corpus": texts},
        "Referee": {"model": spec, "texts": TEXTS},
        "Scan": {"model": spec, "corpus": texts, "tokens": tokens},
        "Study": {"model": spec, "corpus": texts},
        "Sweep": {"model": spec, "tasks": evaluation.tasks},
        "WindowHeads": {"window_heads": 2},
        "WindowShare": {"window_share": 0.5},
    }
    exported = {name: getattr(headscan, name) for name in dir(headscan) if name not in RECORDS | {"BASELINE"}}
    classes = {name: cls for name, cls in exported.items() if is_dataclass(cls)}
    return {name: pruning() if name == "Prune" else cls(**needed.get(name, {})) for name, cls in classes.items()}


def assert_refused(settings: Any, field: str, value: object) -> None:
    """Assert that settings refuse the value of a field on one line that begins with the field's name, or with the noun
    for a name that is one of many.
    """
    message = rf"^(`|{type(settings).__name__}\.){field}\b"
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
        for kind in declared_fields(type(settings)):
            field = kind.name
            if kind.many:
                tuples.add(f"{name}.{field}")
                if f"{name}.{field}" != "TaskConfig.names":
                    assert_refused(settings, field, "mmlu")
                assert_refused(settings, field, b"mmlu")
            if kind.choices:
                literals.add(f"{name}.{field}")
                assert_refused(settings, field, ("unknown",) if kind.many else "unknown")
    assert {"Prune.unit", "Plan.unit", "Plan.method", "Study.prune_by", "Ablate.metric", "Scan.panel"} <= literals
    assert {"TaskConfig.names", "CriteriaComparison.criteria", "Prune.methods", "Plan.recent"} <= tuples


def test_settings_refuse_what_is_not_of_the_class_of_a_field(all_settings: dict[str, Any]) -> None:
    checked = set()
    for name, settings in all_settings.items():
        for kind in declared_fields(type(settings)):
            field = kind.name
            if kind.classes:
                checked.add(f"{name}.{field}")
                assert_refused(settings, field, (512,) if kind.many else 512)
                if not kind.optional:
                    assert_refused(settings, field, (None,) if kind.many else None)
    assert {"Scan.tokens", "Evaluate.tasks", "Prune.texts", "Referee.compared", "Study.model"} <= checked


def test_options_that_are_unknown_or_exclude_each_other_are_refused(spec: ModelSpec, tmp_path: Path) -> None:
    step = Scan(spec, CorpusSpec("python-stdlib"), TokenConfig(64))
    with pytest.raises(TypeError, match=r"^unknown option 'here'\. Choose from devices, ray_address, "):
        step.run(tmp_path / "s.duckdb", here=True)  # type: ignore[call-arg]
    with pytest.raises(HeadscanError, match=r"^`stages` is only for `placement=pipeline`\. Leave out one of the two$"):
        PlacementRequest("whole", stages=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, r"^`devices=1` is no PlacementRequest\. Pass a PlacementRequest$"),
        ({"devices": "cuda"}, r"^`placement='cuda'` is unknown\. Choose auto or whole or "),
        ({"timeouts": 60}, r"^`timeouts=60` is no Timeouts\."),
        ({"resume_anyway": "yes"}, r"^`resume_anyway='yes'` is not True or False\."),
        ({"ray_address": "first"}, r"^'first' is no address of a Ray cluster: write HOST:PORT, such as first:6379, or"),
        ({"ray_address": 6379}, r"^6379 is no address of a Ray cluster"),
    ],
)
def test_options_are_checked_before_files_are_read(
    options: dict[str, Any], message: str, labelled: Ablate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("a file was read")

    for reader in ("steps.open_run.identify", "texts.labelled_texts.read_labelled", "steps.open_run.ModelOpener"):
        monkeypatch.setattr(f"headscan.{reader}", read)
    for step in (Scan(labelled.model, CorpusSpec("python-stdlib"), TokenConfig(64)), labelled):
        with pytest.raises(HeadscanError, match=message):
            step.run(tmp_path / "s.duckdb", **options)


CORPUS = CorpusSpec("python-stdlib")


def test_a_memory_limit_sets_the_batch_size_of_steps_and_verbs(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb finds the run of the step complete, because both have the same batch size."""
    store, lines = tmp_path / "s.duckdb", list[str]()
    step = Scan(ModelSpec("demo"), CorpusSpec(str(corpus_folder)), TokenConfig(64))
    limited = PlacementRequest(device="cpu", memory=64 << 20)
    run_id = step.run(store, devices=limited, say=lines.append).run_id
    (run,) = Store(store).runs()
    assert 64 <= run["config"]["batch_tokens"] < BATCH_TOKENS
    assert lines[0].startswith("placement: streamed, on cpu within 0.06 GiB")
    words = ["scan", "demo", "--corpus", str(corpus_folder), "--max-tokens", "64", "--device", "cpu"]
    assert main([*words, "--memory", "64MiB", "--store", str(store)]) == 0
    assert f"run {run_id} is complete" in capsys.readouterr().out


class Begun(Exception):
    """The work of a step has begun."""


#: The work of every step that stores what it measures; those on labelled examples have a function of their own.
WORK = {
    "scan": "steps.run_scan.run_scan",
    "importance": "steps.run_importance.run_importance",
    "probe": "steps.run_probe.run_probe",
    "gates": "steps.run_gates.run_gates",
    "ablate": "steps.run_ablate.run_ablate",
    "evaluate": "steps.run_evaluation.run_evaluation",
    "sweep": "steps.run_sweep.run_sweep",
    "referee": "steps.referee.run_referee.run_referee",
    "plan": "steps.run_plan.run_plan",
    "prune": "steps.prune.run_prune.run_prune",
    "study": "study.run_study.run_study",
    "labelled importance": "steps.run_importance.run_importance",
    "labelled ablate": "steps.run_ablate.run_ablate",
    "labelled referee": "steps.referee.run_labelled_referee.run_labelled_referee",
}


@pytest.mark.parametrize("name", WORK)
def test_the_batch_size_of_the_devices_reaches_every_step(
    name: str, evaluation: Evaluate, labelled: Ablate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, texts = evaluation.model, PruneTexts(CORPUS, max_tokens=64)
    compared = CriteriaComparison(("importance",))
    steps: dict[str, Step[Any]] = {
        "scan": Scan(spec, CORPUS, TokenConfig(64)),
        "importance": Importance(spec, CORPUS, TokenConfig(64)),
        "probe": Probe(spec),
        "gates": Gates(spec, CORPUS),
        "ablate": Ablate(spec, evaluation.tasks),
        "evaluate": replace(evaluation, arms=[]),
        "sweep": Sweep(spec, evaluation.tasks, scores=("entropy",), shares=(0.2,)),
        "referee": Referee(spec, evaluation.tasks, texts=texts),
        "plan": Plan(spec, method="measured", corpus=CORPUS, max_tokens=128),
        "prune": Prune(spec, evaluation.tasks, out=tmp_path / "smaller", share=0.3, texts=texts),
        "study": Study(spec, CORPUS, tmp_path / "study"),
        "labelled importance": Importance(labelled.model, data=labelled.data),
        "labelled ablate": labelled,
        "labelled referee": Referee(labelled.model, data=labelled.data, compared=compared),
    }
    exported = [getattr(headscan, each) for each in dir(headscan)]
    classes = {each for each in exported if isinstance(each, type) and issubclass(each, Step)}
    assert steps.keys() == WORK.keys() and {type(each) for each in steps.values()} == classes - {Generate}
    sizes = list[int]()

    def begun(_: Step[Any], run: headscan.runs.run_context.Run, *__: object, **___: object) -> None:
        sizes.append(run.batch_tokens)
        raise Begun

    monkeypatch.setattr(f"headscan.{WORK[name]}", begun)
    store = () if name == "study" else (tmp_path / "s.duckdb",)
    with pytest.raises(Begun):
        steps[name].run(*store, devices=PlacementRequest(device="cpu", batch_tokens=640), say=quiet)
    assert sizes == [640]


def test_gates_are_placed_for_the_tokens_of_their_fit(
    corpus_folder: Path, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step and verb pass the tokens of a gradient step to the opener."""
    placed, store = list[int](), tmp_path / "s.duckdb"

    def opener(model: ModelSpec, tokens: int, request: PlacementRequest, batch_tokens: int, **_: object) -> None:
        placed.append(request.batch_tokens or batch_tokens)
        raise HeadscanError("placed")

    monkeypatch.setattr("headscan.steps.open_run.ModelOpener", opener)
    step = Gates(spec, CorpusSpec(str(corpus_folder)), GateFitConfig(batch_tokens=256))
    for devices in (PlacementRequest(), PlacementRequest(batch_tokens=128)):
        with pytest.raises(HeadscanError, match="placed"):
            step.run(store, devices=devices, say=quiet)
    words = ["gates", "demo", "--corpus", str(corpus_folder), "--store", str(store)]
    assert main(words) == main([*words, "--batch-tokens", "64"]) == 2
    assert placed == [256, 128, GateFitConfig().batch_tokens, 64]


def test_steps_that_remove_heads_need_one_whole_replica(evaluation: Evaluate, tmp_path: Path) -> None:
    step = Prune(evaluation.model, evaluation.tasks, out=tmp_path / "smaller", share=0.3, texts=PruneTexts(CORPUS))
    for devices, message in (
        (PlacementRequest(device="cpu", replicas=2), r"`replicas=2` \(limit 1 for this "),
        (PlacementRequest(device="cpu", placement="streamed"), "the removal of heads needs all layers"),
    ):
        with pytest.raises(HeadscanError, match=message):
            step.run(tmp_path / "s.duckdb", devices=devices, say=quiet)
    with pytest.raises(HeadscanError, match=r"^`ray_address=auto`: this step runs in one process\. Leave out .*$"):
        step.run(tmp_path / "s.duckdb", ray_address="auto", say=quiet)


@pytest.fixture
def placing(evaluation: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a model with 8,192 positions fail with the tokens for which they are placed."""

    def opener(model: ModelSpec, tokens: int, *_: object, **__: object) -> None:
        raise HeadscanError(f"placed for {tokens} tokens")

    identity = replace(identify(evaluation.model), max_tokens=8192)
    monkeypatch.setattr("headscan.steps.open_run.identify", lambda model, **_: identity)
    monkeypatch.setattr("headscan.steps.open_run.ModelOpener", opener)


def placed_for(step: Step[Any], store: Path | None) -> str:
    """Return for how many tokens a step is placed; see `placing`."""
    with pytest.raises(HeadscanError, match=r"^placed for ") as refused:
        step.run(store, say=quiet)
    return str(refused.value)


@pytest.mark.parametrize(("longest", "placed"), [(4096, 4096), (64, TASK_TOKENS)])
def test_pruning_has_memory_for_its_longest_text(
    longest: int, placed: int, evaluation: Evaluate, placing: None, tmp_path: Path
) -> None:
    texts = PruneTexts(CORPUS, max_tokens=longest)
    step = Prune(evaluation.model, evaluation.tasks, None, out=tmp_path / "smaller", share=0.3, texts=texts)
    assert placed_for(step, tmp_path / "s.duckdb") == f"placed for {placed} tokens"


@pytest.mark.parametrize(
    ("recall", "text", "placed"),
    [
        (None, 64, TASK_TOKENS),
        (None, 3000, 3000),
        (RecallQuestions(), None, 4096),
        (RecallQuestions((256, 6000)), 3000, 6000),
    ],
)
def test_evaluations_have_memory_for_recall_and_held_out_text(
    recall: RecallQuestions | None, text: int | None, placed: int, evaluation: Evaluate, placing: None, tmp_path: Path
) -> None:
    held_out = None if text is None else HeldOutText("a corpus", (TextChunk("a.txt", (1,) * text, text),))
    texts, store = PruneTexts(CORPUS, max_tokens=text), tmp_path / "s.duckdb"
    spec, tasks = evaluation.model, evaluation.tasks
    pruning = Prune(spec, tasks, recall, out=tmp_path / "smaller", share=0.3, texts=texts)
    for step in (
        Evaluate(spec, tasks, recall, text=held_out),
        Sweep(spec, tasks, recall, text=held_out),
        Referee(spec, tasks, recall, texts=texts),
        pruning,
    ):
        assert placed_for(step, store) == f"placed for {placed} tokens"
    unjudged = replace(pruning, skip_verdict=True)
    assert placed_for(unjudged, store) == f"placed for {max(text or 0, TASK_TOKENS)} tokens"


@pytest.mark.parametrize("longest", [3000, 64])
def test_ablate_evaluate_and_study_have_memory_for_their_texts(
    longest: int, evaluation: Evaluate, placing: None, tmp_path: Path
) -> None:
    store, spec = tmp_path / "s.duckdb", evaluation.model
    on_texts = Ablate(spec, corpus=CORPUS, max_tokens=longest)
    assert placed_for(on_texts, store) == f"placed for {longest} tokens"
    assert placed_for(Ablate(spec, evaluation.tasks), store) == f"placed for {TASK_TOKENS} tokens"
    held_out = Evaluate(spec, recall=None, held_out=headscan.LossTexts(CORPUS, max_tokens=longest))
    study = Study(spec, CORPUS, tmp_path / "study", max_tokens=longest)
    for step, where in ((held_out, store), (study, None)):
        assert placed_for(step, where) == f"placed for {max(TASK_TOKENS, longest)} tokens"
