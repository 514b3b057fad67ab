"""Where steps run: batch sizes, and the memory that placements reserve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headscan
from headscan import (
    Ablate,
    CorpusSpec,
    CriteriaComparison,
    Evaluate,
    GateFitConfig,
    Gates,
    Generate,
    Importance,
    ModelSpec,
    PlacementRequest,
    Plan,
    Probe,
    Prune,
    PruneTexts,
    RecallQuestions,
    Referee,
    Scan,
    Study,
    Sweep,
    TokenConfig,
)
from headscan.cli.main import main
from headscan.errors import HeadscanError
from headscan.options import BATCH_TOKENS
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import TASK_TOKENS
from headscan.steps.step import Step
from headscan.store.store import Store
from headscan.texts.held_out_text import HeldOutText, TextChunk
from tests.jobs.conftest import quiet

TEXTS = CorpusSpec("python-stdlib")


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
    spec, texts = evaluation.model, PruneTexts(TEXTS, max_tokens=64)
    compared = CriteriaComparison(("importance",))
    steps: dict[str, Step[Any]] = {
        "scan": Scan(spec, TEXTS, TokenConfig(64)),
        "importance": Importance(spec, TEXTS, TokenConfig(64)),
        "probe": Probe(spec),
        "gates": Gates(spec, TEXTS),
        "ablate": Ablate(spec, evaluation.tasks),
        "evaluate": replace(evaluation, arms=[]),
        "sweep": Sweep(spec, evaluation.tasks, scores=("entropy",), shares=(0.2,)),
        "referee": Referee(spec, evaluation.tasks, texts=texts),
        "plan": Plan(spec, method="measured", corpus=TEXTS, max_tokens=128),
        "prune": Prune(spec, evaluation.tasks, out=tmp_path / "smaller", share=0.3, texts=texts),
        "study": Study(spec, TEXTS, tmp_path / "study"),
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
    step = Prune(evaluation.model, evaluation.tasks, out=tmp_path / "smaller", share=0.3, texts=PruneTexts(TEXTS))
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
    texts = PruneTexts(TEXTS, max_tokens=longest)
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
    texts, store = PruneTexts(TEXTS, max_tokens=text), tmp_path / "s.duckdb"
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
    on_texts = Ablate(spec, corpus=TEXTS, max_tokens=longest)
    assert placed_for(on_texts, store) == f"placed for {longest} tokens"
    assert placed_for(Ablate(spec, evaluation.tasks), store) == f"placed for {TASK_TOKENS} tokens"
    held_out = Evaluate(spec, recall=None, held_out=headscan.LossTexts(TEXTS, max_tokens=longest))
    study = Study(spec, TEXTS, tmp_path / "study", max_tokens=longest)
    for step, where in ((held_out, store), (study, None)):
        assert placed_for(step, where) == f"placed for {max(TASK_TOKENS, longest)} tokens"
