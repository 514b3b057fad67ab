"""Where jobs run: batch sizes, and the memory that placements reserve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headscan import jobs
from headscan.cli.main import main
from headscan.errors import HeadscanError
from headscan.gates.gate_settings import GateFitConfig
from headscan.jobs import job_functions
from headscan.model_spec import ModelSpec
from headscan.plans import WindowShare
from headscan.runs import run_context
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import TASK_TOKENS, CriteriaComparison, TaskConfig
from headscan.settings.saving_settings import PruneTexts
from headscan.steps.prune.pruning_units import ShareBudget
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from headscan.texts.held_out_text import HeldOutText, TextChunk
from tests.jobs.conftest import quiet
from tests.sources import public_names


def test_a_memory_limit_sets_the_batch_size_of_jobs_and_verbs(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb finds the run of the job complete, because both have the same batch size."""
    store, lines = tmp_path / "s.duckdb", list[str]()
    config = jobs.ScanConfig(jobs.ModelSpec("demo"), CorpusSpec(str(corpus_folder)), TokenConfig(64))
    limited = jobs.PlacementRequest(device="cpu", memory=64 << 20)
    run_id = jobs.scan(config, store, devices=limited, say=lines.append).run_id
    (run,) = Store(store).runs()
    assert 64 <= run["config"]["batch_tokens"] < config.batch_tokens
    assert lines[0].startswith("placement: streamed, on cpu within 0.06 GiB")
    words = ["scan", "demo", "--corpus", str(corpus_folder), "--max-tokens", "64", "--device", "cpu"]
    assert main([*words, "--memory", "64MiB", "--store", str(store)]) == 0
    assert f"run {run_id} is complete" in capsys.readouterr().out


class Begun(Exception):
    """A job has begun."""


@pytest.mark.parametrize(
    ("job", "does"),
    [
        ("scan", "steps.run_scan.run_scan"),
        ("importance", "steps.run_importance.run_importance"),
        ("probe", "steps.run_probe.run_probe"),
        ("gates", "steps.run_gates.run_gates"),
        ("ablate", "steps.run_ablate.run_ablate"),
        ("labelled_importance", "steps.run_importance.run_labelled_importance"),
        ("labelled_ablate", "steps.run_labelled_ablate.run_labelled_ablate"),
        ("labelled_referee", "steps.referee.run_labelled_referee.run_labelled_referee"),
        ("evaluate", "steps.run_evaluation.run_evaluation"),
        ("sweep", "steps.run_sweep.run_sweep"),
        ("referee", "steps.referee.run_referee.run_referee"),
        ("plan", "steps.run_plan.run_plan"),
        ("prune", "steps.prune.run_prune.run_prune"),
        ("study", "study.run_study.run_study"),
    ],
)
def test_the_batch_size_of_the_devices_reaches_every_job(
    job: str,
    does: str,
    evaluation: jobs.EvaluateConfig,
    labelled: jobs.LabelledEvaluateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, texts, store = evaluation.model, CorpusSpec("python-stdlib"), tmp_path / "s.duckdb"
    calls: dict[str, tuple[Any, ...]] = {
        "scan": (jobs.ScanConfig(spec, texts, TokenConfig(64)), store),
        "importance": (jobs.ImportanceConfig(spec, texts, TokenConfig(64)), store),
        "probe": (jobs.ProbeConfig(spec), store),
        "gates": (jobs.GatesConfig(spec, texts), store),
        "ablate": (jobs.AblateConfig(evaluation), store),
        "labelled_importance": (jobs.LabelledImportanceConfig(labelled.model, labelled.data), store),
        "labelled_ablate": (jobs.LabelledAblateConfig(labelled), store),
        "labelled_referee": (jobs.LabelledRefereeConfig(labelled, CriteriaComparison(("importance",))), store),
        "evaluate": (evaluation, store, []),
        "sweep": (jobs.SweepConfig(evaluation, ("entropy",), (0.2,)), store),
        "referee": (jobs.RefereeConfig(evaluation, texts=PruneTexts(texts, max_tokens=64)), store),
        "plan": (jobs.PlanConfig(spec, texts, max_tokens=128), store, WindowShare(0.5)),
        "prune": (
            jobs.PruneConfig(evaluation, tmp_path / "smaller", (ShareBudget(0.3),), texts=PruneTexts(texts)),
            store,
        ),
        "study": (jobs.StudyConfig(spec, texts, str(tmp_path / "study")),),
    }
    assert calls.keys() == {name for name in public_names(jobs) if name.islower()} - {
        "mask_arm",
        "rule_arm",
        "random_controls",
        "export",
        "generate",
    }
    received = list[Any]()

    def begun(*arguments: Any, **_: Any) -> None:
        received.append(arguments[0])
        raise Begun

    monkeypatch.setattr(f"headscan.{does}", begun)
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
    texts = PruneTexts(CorpusSpec("python-stdlib"))
    config = jobs.PruneConfig(evaluation, tmp_path / "smaller", (ShareBudget(0.3),), texts=texts)
    for devices, message in (
        (jobs.PlacementRequest(device="cpu", replicas=2), r"`replicas=2` \(limit 1 for this job\)"),
        (jobs.PlacementRequest(device="cpu", placement="streamed"), "the removal of heads needs all layers"),
    ):
        with pytest.raises(HeadscanError, match=message):
            jobs.prune(config, tmp_path / "s.duckdb", devices=devices, say=quiet)
    with pytest.raises(HeadscanError, match=r"^`ray_address=auto`: this job runs in one process\. Leave out .*$"):
        jobs.prune(config, tmp_path / "s.duckdb", ray_address="auto", say=quiet)  # type: ignore[call-arg]


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
    texts = PruneTexts(CorpusSpec("python-stdlib"), max_tokens=longest)
    config = jobs.PruneConfig(evaluation, tmp_path / "smaller", budgets=(ShareBudget(0.3),), texts=texts)
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.prune(config, tmp_path / "s.duckdb", say=quiet)


@pytest.mark.parametrize(
    ("recall", "text", "placed"),
    [
        (None, 64, TASK_TOKENS),
        (None, 3000, 3000),
        (jobs.RecallQuestions(), None, 4096),
        (jobs.RecallQuestions((256, 6000)), 3000, 6000),
    ],
)
def test_evaluations_have_memory_for_recall_and_held_out_text(
    recall: jobs.RecallQuestions | None,
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
    texts = PruneTexts(CorpusSpec("python-stdlib"), max_tokens=text)
    pruned = jobs.PruneConfig(replace(asked, text=None), tmp_path / "smaller", (ShareBudget(0.3),), texts=texts)
    with pytest.raises(HeadscanError, match=f"placed for {placed} tokens"):
        jobs.prune(pruned, store, say=quiet)
    with pytest.raises(HeadscanError, match=f"placed for {max(text or 0, TASK_TOKENS)} tokens"):
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
    study = jobs.StudyConfig(evaluation.model, texts.corpus, tmp_path / "study", max_tokens=longest)
    with pytest.raises(HeadscanError, match=f"placed for {max(TASK_TOKENS, longest)} tokens"):
        jobs.study(study, say=quiet)
