"""Scans, evaluations and texts never mix sequences that a model reads with different rotary frequencies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import headscan
from headscan.catalog import MassWidths, panel_names
from headscan.cluster.placements import StreamedPlacement
from headscan.cluster.pool import InProcessPool
from headscan.cluster.streamed_pool import StreamedPool
from headscan.engine import likelihood
from headscan.engine.answer import AnsweringSettings, AnswerItem, answer_item
from headscan.engine.arms import BASELINE, Arm
from headscan.engine.generation import generated_texts
from headscan.engine.likelihood import likelihoods
from headscan.engine.shared_row_likelihood import shared_row_likelihoods
from headscan.measure.behaviour_probes import NeedlePrompt
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.models import token_batches
from headscan.models.loaded_model import LoadedModel
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_probe import ProbeItem, probe_heads
from headscan.steps.run_scan import MeasureShard, run_scan
from headscan.steps.scan import Scan
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec, Shard, TokenConfig, TokenSequence
from headscan.texts.token_requests import GenerationRequest, Request
from tests.jobs.conftest import THREADS, make_tokenizer, naive_likelihood, run_on, write_task
from tests.rope_models import LIMIT, ROPES, load_rope_model

LENGTHS = (120, 10, 64, 65, 120, 63, 90, 3, 66, 90)
STREAMED = StreamedPlacement("cpu", 1, 1 << 30, ((0, 1), (1, 3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ropes")
    for rope in ROPES:
        load_rope_model(rope, folder)
        make_tokenizer(300).save_pretrained(folder / rope)
    return folder


@pytest.fixture(params=ROPES)
def lm(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    return load_rope_model(request.param, folder)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(Random(f"{count} {seed}").choices(range(5, 300), k=count))


def shard() -> Shard:
    texts = tuple(
        TokenSequence(i, i, "text", np.array(tokens(n, i), dtype=np.int32), False, "") for i, n in enumerate(LENGTHS)
    )
    return Shard(0, texts, "")


def measure(lm: LoadedModel, batch_tokens: int = 1000) -> MeasureShard:
    return MeasureShard(panel_names("full"), MassWidths(), batch_tokens, False, lm.rope_lengths)


def test_a_shard_has_the_numbers_of_each_sequence_alone(lm: LoadedModel) -> None:
    rows = measure(lm)(lm, shard()).heads.to_pandas()
    for text in shard().sequences:
        alone = headscan.collect(lm, torch.tensor([text.ids.tolist()]), statistics=["entropy", "projected_output_norm"])
        mine = rows[rows["sequence"] == text.index].sort_values(["layer", "head"])
        for name, values in alone.items():
            found = torch.tensor(mine[name].to_numpy()).reshape(3, 6)
            torch.testing.assert_close(found, values[0], rtol=1e-4, atol=1e-5)


def test_needle_prompts_on_both_sides_of_a_switch_have_the_scores_of_each_alone(lm: LoadedModel) -> None:
    prompts = tuple(NeedlePrompt(tokens(length), 3, 6) for length in (LIMIT - 2, LIMIT + 8, LIMIT - 9, LIMIT + 5))
    together = probe_heads(lm, ProbeItem("needles", BehaviourProbe(), prompts, 1000))["retrieval_score"]
    alone = [
        probe_heads(lm, ProbeItem("needle", BehaviourProbe(), (each,), 1000))["retrieval_score"] for each in prompts
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_a_shard_is_the_same_range_by_range(lm: LoadedModel) -> None:
    task = measure(lm, batch_tokens=260)
    whole = task(lm, shard()).heads.to_pandas().drop(columns="site")
    with StreamedPool(ModelSpec(lm.source), STREAMED) as pool:
        [done] = pool.map(task, [shard()])
    ranges = done.value.heads.to_pandas().drop(columns="site")
    for name in ("entropy", "output_norm", "first_token_weight"):
        np.testing.assert_allclose(ranges[name], whole[name], rtol=1e-4, atol=1e-5)


def requests() -> tuple[Request, ...]:
    """Return contexts on both sides of the limit, with a common prefix."""
    start = tokens(40)
    found = [Request(start + tokens(n, seed), 2) for seed, n in enumerate((5, 60, 7, 24, 25, 26, 80, 60, 9, 11))]
    return (*found, Request(tokens(150), 3), Request(tokens(65), 1), Request(tokens(66), 1))


@pytest.mark.parametrize("ablated", [None, headscan.HeadRule("output_norm_ln", 0.9)])
def test_likelihoods_are_those_of_each_request_alone(
    lm: LoadedModel, ablated: headscan.HeadRule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests()
    monkeypatch.setattr(token_batches, "_PASS_COST", {"cpu": 8})  # so that short prefixes are shared, too
    prefixes: list[int] = []
    read = likelihood.read_prefix
    monkeypatch.setattr(likelihood, "read_prefix", lambda *a: prefixes.extend(map(len, a[1])) or read(*a))
    together = likelihoods(lm, asked, ablated, 2000, True)
    assert prefixes == ([40] if ablated is None else [])
    packed = shared_row_likelihoods(lm, asked, ablated, 2000)
    with StreamedPool(ModelSpec(lm.source), STREAMED) as pool:
        settings = AnsweringSettings(2000, False, rope=lm.rope_lengths)
        [ranged] = pool.one(answer_item, AnswerItem("all", asked, (ablated,), settings))
    for index, request in enumerate(asked):
        if ablated is None:
            alone = naive_likelihood(lm, request)
        else:
            with headscan.intervene(lm, ablated):
                alone = naive_likelihood(lm, request)
        for found in (together, packed, ranged):
            assert found.values[index].log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-4, abs=1e-4)


def test_texts_are_those_of_each_prompt_alone(lm: LoadedModel) -> None:
    lm = replace(lm, tokenizer=make_tokenizer(300))
    prompts = [tokens(n, 7) for n in (20, 50, 57, 61, 64, 64, 70, 90)]
    asked = tuple(GenerationRequest(ids, (), 12, (("do_sample", False),)) for ids in prompts)
    together = generated_texts(lm, asked, None, 4000)
    alone = [generated_texts(lm, (each,), None, 4000).values[0] for each in asked]
    assert list(together.values) == alone


@pytest.mark.slow
def test_scans_and_evaluations_use_the_lengths_of_their_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = ModelSpec(str(folder / "longrope")), Store(tmp_path / "s.duckdb")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number:02}.txt").write_text(" ".join(map(str, range(8 * number + 3))))
    step = Scan(spec, CorpusSpec(str(texts)), TokenConfig(200))
    with InProcessPool(spec, THREADS) as pool:
        run_scan(step, Run(spec, store, lambda _: InProcessPool(spec, THREADS), batch_tokens=2000))
        rows = [{"q": "1 " * (4 * n), "choices": [" 2", " 3"], "a": n % 2} for n in range(1, 20)]
        choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
        write_task(tmp_path, "long", rows, choice | {"metric_list": [{"metric": "acc"}]})
        rule = Arm("rule", ArmKind.RULE, headscan.HeadRule("output_norm_ln", 0.9), "output_norm_ln")
        tasks = TaskConfig(("long",), include_path=str(tmp_path))
        # A rule that met a mixed batch would have raised.
        run_evaluation(Evaluate(spec, tasks, recall=None), run_on(pool, store, batch_tokens=3000), [BASELINE, rule])
    tokens_of = [row["tokens"] for row in store.query("from sequences").to_pylist()]
    assert min(tokens_of) <= LIMIT < max(tokens_of)
