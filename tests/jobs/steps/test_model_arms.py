"""Arms that another model answers: compared, and never loaded together with the baseline."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import headscan
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, Arm, mask_arm, model_arm
from headscan.errors import InterventionError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.runs.run_context import PoolFactory
from headscan.settings.corpus_settings import TokenConfig
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import check_models, run_evaluation
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec, open_corpus, sequences
from headscan.texts.held_out_text import HeldOutText, TextChunk, chunks
from headscan.texts.tasks import Questions
from headscan.texts.token_requests import Request
from headscan.verdicts.judge import judge
from tests.jobs.conftest import THREADS, make_tokenizer, naive_likelihood, run_on
from tests.small_models import make_model

CHUNKS = tuple(
    TextChunk(f"document {i // 2}", tuple(int(t) for t in np.random.default_rng(i).integers(2, 300, 20 + i)), 40 + i)
    for i in range(6)
)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The same model with a head zeroed in its weights."""
    folder = tmp_path_factory.mktemp("models") / "without-a-head"
    shutil.copytree(model_folder, folder)
    lm = headscan.load(str(folder), device="cpu")
    projection = lm.module(lm.grid.sites[1].output_projection)
    width = lm.grid.sites[1].value_dim
    with torch.no_grad():
        projection.weight[:, 2 * width : 3 * width] = 0
    lm.model.save_pretrained(folder)
    return folder


@pytest.fixture
def config(spec: ModelSpec, task_folder: Path) -> Evaluate:
    tasks = TaskConfig(("counting", "telling"), include_path=str(task_folder), limit=6)
    return Evaluate(spec, tasks, recall=None, text=HeldOutText("made up", CHUNKS))


class Watched(InProcessPool):
    """Notes which models are loaded."""

    loaded: ClassVar[list[str]] = []

    def _model(self) -> headscan.LoadedModel:
        lm = super()._model()
        if self._spec.source not in self.loaded:
            self.loaded.append(self._spec.source)
        assert len(self.loaded) == 1, "two models are loaded together"
        return lm

    def close(self) -> None:
        super().close()
        if self._spec.source in self.loaded:
            self.loaded.remove(self._spec.source)


def open_model(spec: ModelSpec) -> InProcessPool:
    return Watched(spec, THREADS)


def run(config: Evaluate, store: Store, arms: Sequence[Arm], others: PoolFactory = open_model, **options: Any) -> str:
    with Watched(config.model, THREADS) as pool:
        return run_evaluation(config, run_on(pool, store, others, batch_tokens=50, **options), arms)


def model_arm_of(folder: Path, spec: ModelSpec) -> Arm:
    other = dataclasses.replace(spec, source=str(folder))
    return model_arm(other, identify(other), identify(spec))


@pytest.mark.slow
def test_a_model_without_a_head_answers_as_the_mask_of_that_head(
    config: Evaluate, spec: ModelSpec, store: Store, other_folder: Path, model_folder: Path
) -> None:
    arms = [BASELINE, mask_arm([(1, 2)]), model_arm_of(other_folder, spec), model_arm_of(model_folder, spec)]
    run_id = run(config, store, arms)
    found = {}
    for name in (arm.name for arm in arms):
        found[name] = store.query(
            "select task, question, response, log_likelihoods from answers join arms using (arm_id) where name = ?"
            " order by task, question",
            [name],
        ).to_pylist()
    base, masked, other, same = found.values()
    for row, twin in zip(masked, other, strict=True):
        assert row["response"] == twin["response"] or row["task"] == "text"
        assert np.allclose(row["log_likelihoods"], twin["log_likelihoods"], atol=1e-4)
    assert base == same
    moved = [
        abs(a["log_likelihoods"][0] - b["log_likelihoods"][0])
        for a, b in zip(base, other, strict=True)
        if a["log_likelihoods"]
    ]
    assert max(moved) > 1e-3
    verdict = judge(store, run_id)
    of_model = next(arm for arm in verdict.arms if arm.name == arms[2].name)
    assert of_model.kind is ArmKind.MODEL and of_model.arm.ablated_share == 0.0
    sentence = of_model.sentence()
    assert sentence.startswith(f"model without-a-head {arms[2].name[-6:]}: not shown to be safe: ")
    assert "ablated" not in sentence and "control" not in sentence
    assert next(arm for arm in verdict.arms if arm.name == arms[3].name).paired.difference == 0


def test_the_loss_of_text_is_that_of_separate_passes(
    config: Evaluate, spec: ModelSpec, store: Store, other_folder: Path
) -> None:
    arms = [BASELINE, model_arm_of(other_folder, spec)]
    run_id = run(dataclasses.replace(config, tasks=TaskConfig()), store, arms)
    losses = []
    for source in (spec.source, str(other_folder)):
        lm = headscan.load(source, device="cpu")
        losses.append([naive_likelihood(lm, chunk.request) for chunk in CHUNKS])
    tokens = sum(len(chunk.ids) - 1 for chunk in CHUNKS)
    (arm,) = judge(store, run_id).by_name.values()
    measures = {measure.metric: measure for measure in arm.metrics}
    nats = [-sum(each.log_likelihood for each in found) / tokens for found in losses]
    right = [sum(each.greedy_tokens for each in found) / tokens for found in losses]
    loss, accuracy = measures["loss"], measures["next_token_accuracy"]
    assert (loss.baseline, loss.arm) == (pytest.approx(nats[0], abs=1e-5), pytest.approx(nats[1], abs=1e-5))
    assert loss.increase is not None and loss.increase.documents == 3
    assert loss.increase.difference == pytest.approx(nats[1] - nats[0], abs=1e-5)
    assert loss.increase.low < loss.increase.difference < loss.increase.high
    assert accuracy.increase is not None
    assert accuracy.increase.difference == pytest.approx(100 * (right[1] - right[0]), abs=1e-6)
    bits = measures["bits_per_byte"].increase
    assert bits is not None
    sizes = sum(chunk.size for chunk in CHUNKS)
    assert bits.difference == pytest.approx((nats[1] - nats[0]) * tokens / sizes / np.log(2), abs=1e-5)
    # Three documents show nothing about the loss, so it has no interval.
    shown = f"loss: {nats[1]:.4g} against {nats[0]:.4g}: {nats[1] - nats[0]:+.4f} nats per token"
    assert shown in arm.sentence()


def test_another_content_of_a_folder_is_another_arm(spec: ModelSpec, other_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "without-a-head"
    shutil.copytree(other_folder, folder)
    before = model_arm_of(folder, spec)
    assert before.name == model_arm_of(other_folder, spec).name
    lm = headscan.load(str(folder), device="cpu")
    with torch.no_grad():
        lm.module(lm.grid.sites[0].output_projection).weight[0, 0] += 1
    lm.model.save_pretrained(folder)
    assert model_arm_of(folder, spec).name != before.name


def short_model(folder: Path, positions: int) -> Path:
    """Save a model like that of ``spec`` with fewer positions."""
    short = folder / f"short-{positions}"
    make_model("llama", vocabulary=300).save_pretrained(short)
    make_tokenizer(300).save_pretrained(short)
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": positions}))
    return short


@pytest.mark.parametrize(("task", "generated"), [("telling", 8), ("counting", 0)])
def test_the_positions_of_a_model_hold_the_longest_question_and_its_answer(
    spec: ModelSpec, task_folder: Path, tmp_path: Path, task: str, generated: int
) -> None:
    identity = identify(spec)
    questions = Questions(TaskConfig((task,), include_path=str(task_folder)), None, identity)
    lengths = [
        # The last token of a continuation is predicted, not read.
        len(request.ids) - 1 if isinstance(request, Request) else len(request.ids) + generated
        for request in questions.requests.values()
    ]
    enough, few = (model_arm_of(short_model(tmp_path, max(lengths) - less), spec) for less in (0, 1))
    assert len(check_models([enough], identity, questions)) == 1
    with pytest.raises(InterventionError, match=rf"has {max(lengths) - 1} positions, but .* need {max(lengths)}\. Use"):
        check_models([few], identity, questions)


def test_bad_models_are_refused_before_anything_is_asked(
    config: Evaluate, spec: ModelSpec, store: Store, other_folder: Path, tmp_path: Path
) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(other_folder, strange)
    make_tokenizer(280).save_pretrained(strange)
    with pytest.raises(InterventionError, match=r"strange has another tokenizer than tiny-llama: .* entries differ"):
        model_arm_of(strange, spec)
    short = short_model(tmp_path, 16)
    arm = model_arm_of(other_folder, spec)
    changed = dataclasses.replace(arm, details=(("weights_hash", "other"),))
    cases = {
        "has 16 positions, but the longest question and its answer need": [model_arm_of(short, spec)],
        "the files of .* have changed": [changed],
    }
    for message, arms in cases.items():
        with pytest.raises(InterventionError, match=message):
            run(config, store, [BASELINE, *arms])
    assert store.runs("evaluate") == []
    with pytest.raises(InterventionError, match="has a model of its own and ablates heads"):
        dataclasses.replace(mask_arm([(0, 1)]), model=spec)


def test_the_command_compares_checkpoints(
    model_folder: Path, other_folder: Path, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(model_folder), "--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    command += ["--models", f"{other_folder},{model_folder}", "--store", str(tmp_path / "s.duckdb"), "--device", "cpu"]
    assert main(command) == 0
    out = capsys.readouterr().out
    rows = [line.split()[1] for line in out.splitlines() if line.startswith("model ") and ": " not in line]
    assert rows == ["without-a-head", "tiny-llama"] and "whole model: accuracy" in out
    assert main([*command, "--models", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_texts_of_one_block_of_a_document_are_judged_together(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(" ".join(str(number) for number in range(6_000)))
    (tmp_path / "short.txt").write_text("a short text " * 20)
    spec = ModelSpec("demo", "float32")
    tokenizer = identify(spec).tokenizer
    texts = list(sequences(open_corpus(CorpusSpec(str(tmp_path))), tokenizer, TokenConfig(100, mode="chunk")))
    found = chunks(tokenizer, texts)
    *blocks, short = dict.fromkeys(chunk.document for chunk in found)
    assert short.endswith("short.txt") and len(blocks) > 2
    assert [name.rpartition("long.txt")[2] for name in blocks] == [
        "",
        *(f", block {n}" for n in range(2, 1 + len(blocks))),
    ]
    assert {chunk.document for chunk in chunks(tokenizer, texts, whole=True)} == {text.source for text in texts}
