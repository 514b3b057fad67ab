"""The table of single heads equals a full forward per masked head; the verbs `ablate`, `rank` and `sweep --replace`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscan
from headscan.ablation.collect_outputs import head_means, head_samples
from headscan.ablation.intervention import ZERO, Replacement
from headscan.architectures import HEADS
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool
from headscan.errors import InterventionError, SequenceError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import ReplacementConfig, TaskConfig
from headscan.steps.ablate import Ablate
from headscan.steps.run_ablate import AblateResult, head_arms, run_ablate
from headscan.store.store import Store
from headscan.store.tables import ALL_BUT_ONE, EACH
from headscan.texts import CorpusSpec
from headscan.texts.held_out_text import HeldOutText
from headscan.texts.sequences import read_spread
from headscan.texts.tasks import Questions
from headscan.texts.token_requests import LogLikelihood, Request, input_key
from headscan.verdicts.head_effects import HeadEffect, read_effects
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import naive_likelihood, run_on

LAYERS = 3


@pytest.fixture(scope="module")
def on_text(spec: ModelSpec, corpus_folder: Path) -> Ablate:
    return Ablate(spec, corpus=CorpusSpec(str(corpus_folder)), sequences=10, max_tokens=40)


@pytest.fixture(scope="module")
def on_task(spec: ModelSpec, task_folder: Path) -> Ablate:
    return Ablate(spec, TaskConfig(("counting",), include_path=str(task_folder)))


def ablated(
    lm: headscan.LoadedModel, heads: Iterable[tuple[int, int]], value: Replacement, request: Request
) -> AbstractContextManager[object]:
    return headscan.intervene(lm, headscan.HeadMask(heads, value), input_keys=[input_key(request.ids[:-1])])


def oracle(
    lm: headscan.LoadedModel, heads: Iterable[tuple[int, int]], requests: Mapping[str, Any], value: Replacement = ZERO
) -> dict[str, LogLikelihood | str]:
    """One full forward pass for each request, with heads ablated."""
    found: dict[str, LogLikelihood | str] = {}
    for name, request in requests.items():
        with ablated(lm, heads, value, request):
            found[name] = naive_likelihood(lm, request)
    return found


def loss(questions: Questions, answers: Mapping[str, LogLikelihood | str]) -> float:
    return next(row["value"] for row in questions.grade(answers).results.to_pylist() if row["metric"] == "loss")


def values_of(effects: Iterable[HeadEffect]) -> dict[tuple[int, int], float]:
    return {(effect.layer, effect.head): effect.effect for effect in effects}


def every_head() -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


def questions_of(config: Ablate) -> Questions:
    text = None
    if config.corpus is not None:
        text = HeldOutText.of_corpus(
            config.corpus, config.model, sequences=config.sequences, max_tokens=config.max_tokens
        )
    return Questions(config.tasks, None, identify(config.model), text)


def run(config: Ablate, store: Store, pool: InProcessPool) -> AblateResult:
    return run_ablate(config, run_on(pool, store, batch_tokens=120))


@pytest.mark.parametrize(
    "value", ["zero", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mean", "resample"))]
)
def test_losses_equal_a_full_forward_per_head(
    on_text: Ablate, store: Store, pool: InProcessPool, value: str, corpus_folder: Path
) -> None:
    corpus = CorpusSpec(str(corpus_folder))
    by_value = {
        "zero": ReplacementConfig(),
        "mean": ReplacementConfig("mean", corpus, texts=5),
        "resample": ReplacementConfig("resample", corpus, samples=3),
    }
    config = replace(on_text, sequences=5, replacement=by_value[value])
    result = run(config, store, pool)
    lm, questions = pool._model(), questions_of(config)
    replacement: Replacement = ZERO
    if value != "zero":
        longest = max(len(request.ids) - 1 for request in questions.requests.values())
        tokenizer = identify(config.model).tokenizer
        if value == "mean":
            texts = read_spread(corpus, tokenizer, 256, 5, shortest=16)
            lengths = [len(text) for text in texts]
            ids = np.zeros((len(texts), max(lengths)), dtype=np.int64)
            for row, text in zip(ids, texts, strict=True):
                row[: len(text)] = text.ids
            replacement = head_means(lm, torch.tensor(ids), lengths)
        else:
            texts = read_spread(corpus, tokenizer, longest, 3, shortest=longest, mode="pack")
            replacement = head_samples(lm, torch.tensor(np.array([text.ids for text in texts], dtype=np.int64)))
    before = loss(questions, oracle(lm, [], questions.requests))
    expected = {
        head: loss(questions, oracle(lm, [head], questions.requests, replacement)) - before for head in every_head()
    }
    found = values_of(result.effects)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, found.values())) > 0.01
    assert {(e.metric, e.replacement, e.mode, e.site, e.kv_head) for e in result.effects} == {
        ("loss", value, EACH, "self", kv_head) for kv_head in {e.kv_head for e in result.effects}
    }
    assert result.effects[0].baseline == pytest.approx(before, abs=1e-5)
    arms = store.query("select distinct kind, replacement from arms order by all").to_pylist()
    assert arms == [{"kind": "baseline", "replacement": None}, {"kind": "mask", "replacement": value}]


@pytest.mark.slow
def test_answers_equal_a_full_forward_per_head(on_task: Ablate, store: Store, pool: InProcessPool) -> None:
    said: list[str] = []
    result = run_ablate(on_task, run_on(pool, store, say=said.append))
    lm, questions = pool._model(), questions_of(on_task)
    rows = store.query("from answers join arms using (arm_id) order by question").to_pylist()
    stored = {
        name: [x for row in rows if row["name"] == name for x in row["log_likelihoods"]]
        for name in {row["name"] for row in rows}
    }
    graded = {}
    for name, heads in {"baseline": [], **{f"head {x}:{y}": [(x, y)] for x, y in every_head()}}.items():
        answers = questions.grade(oracle(lm, heads, questions.requests)).answers.to_pylist()
        assert stored[name] == pytest.approx([x for row in answers for x in row["log_likelihoods"]], abs=1e-5)
        graded[name] = np.mean([row["correct"] for row in answers])
    assert values_of(result.effects) == pytest.approx(
        {(x, y): graded[f"head {x}:{y}"] - graded["baseline"] for x, y in every_head()}
    )
    assert {(effect.metric, effect.n) for effect in result.effects} == {("accuracy", 12)}
    assert not any(line.startswith("head") for line in said), "no line for every head"
    assert store.query("from arm_verdicts").num_rows == 0
    assert store.query("select kind, status from runs").to_pylist() == [{"kind": "ablate", "status": "finished"}]


@pytest.mark.slow
def test_layers_are_reduced_to_the_head_that_one_half_prefers(
    on_text: Ablate, store: Store, pool: InProcessPool
) -> None:
    config = replace(on_text, each=True, all_but_one=True)
    result = run(config, store, pool)
    assert [effect for effect in result.effects if effect.mode == EACH] == read_effects(store, result.run_id)
    found = [effect for effect in result.effects if effect.mode == ALL_BUT_ONE]
    assert [effect.layer for effect in found] == list(range(LAYERS))
    assert all(effect.confirmed for effect in found)
    lm, questions = pool._model(), questions_of(config)
    text = questions.text
    assert text is not None
    documents = sorted({p.document for p in text.chunks}, key=lambda name: _md5(_sha256(name)))
    chooses = set(documents[1::2])

    def part(heads: Iterable[tuple[int, int]], *, choosing: bool) -> float:
        rows = [p for p in text.chunks if (p.document in chooses) == choosing]
        of_part = oracle(lm, heads, {str(n): p.request for n, p in enumerate(rows)})
        nats = sum(answer.log_likelihood for answer in of_part.values())  # type: ignore[union-attr]
        return -nats / sum(len(p.ids) - 1 for p in rows)

    for effect in found:
        others = {head: [(effect.layer, other) for other in range(HEADS) if other != head] for head in range(HEADS)}
        best = min(others, key=lambda head: part(others[head], choosing=True))
        judged = part(others[best], choosing=False) - part([], choosing=False)
        assert (effect.head, effect.effect) == (best, pytest.approx(judged, abs=1e-5))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def test_bad_settings_name_their_fix(on_text: Ablate, on_task: Ablate, tmp_path: Path) -> None:
    with pytest.raises(InterventionError, match=r"`replace=mean` needs texts: no corpus\. Set `corpus`"):
        replace(on_task, replacement=ReplacementConfig("mean"))
    with pytest.raises(InterventionError, match="`corpus` has no effect with `kind=zero`"):
        ReplacementConfig("zero", CorpusSpec("texts/"))
    with pytest.raises(InterventionError, match=r"`kind='median'` is unknown"):
        ReplacementConfig("median")  # type: ignore[arg-type]
    with pytest.raises(InterventionError, match=r"`samples=1` \(limit 2\)"):
        ReplacementConfig(samples=1)
    with pytest.raises(InterventionError, match=r"^`tasks` or `corpus` is required, or `data` of"):
        replace(on_text, corpus=None)
    with pytest.raises(InterventionError, match=r"^`sequences` has no effect with `tasks`: leave it out$"):
        replace(on_task, sequences=3)
    with pytest.raises(InterventionError, match=r"^`max_tokens` has no effect with `tasks`: leave it out$"):
        replace(on_task, max_tokens=64)
    with pytest.raises(InterventionError, match=r"^`metric` has no effect without `data`: leave it out$"):
        replace(on_text, metric="loss")
    with pytest.raises(SequenceError, match=r"`max_tokens=5000` \(limit \d+ positions of"):
        HeldOutText.of_corpus(CorpusSpec("python-stdlib"), on_text.model, max_tokens=5000)


def test_arms_cover_every_head_once(pool: InProcessPool) -> None:
    grid = pool._model().grid
    arms = head_arms(grid, ALL_BUT_ONE)
    for arm in arms:
        place = dict(arm.details)
        kept = {(place["layer"], head) for head in range(HEADS)} - set(arm.fixed_heads or ())
        assert kept == {(place["layer"], place["head"])}
    assert len({arm.name for arm in arms}) == LAYERS * HEADS


@pytest.mark.slow
def test_it_prints_both_tables_and_ranks_the_heads(
    spec: ModelSpec, corpus_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", spec.source, "--each", "--all-but-one", "--corpus", str(corpus_folder), "--store"]
    command += [str(store.path), "--sequences", "10", "--max-tokens", "24"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "with ablated heads at zero; baseline" in printed and "on 10 documents" in printed
    assert "heads with a significant effect (q at most 0.05): " in printed
    assert "Each layer reduced to its best head (chosen on one half, judged on the other)" in printed
    assert main(["rank", "--by", "effect", "--store", str(store.path), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["rank", "layer", "head", "kv_head", "effect"] and len(lines) == 4
    best = store.query("from effect_summary where mode = 'each' order by harm, layer, head limit 1").to_pylist()[0]
    assert lines[2].split()[1:3] == [str(best["layer"]), str(best["head"])]
    joined = store.query("select count(*) as n from effect_summary e join runs using (run_id) where kind = 'ablate'")
    assert joined.to_pylist() == [{"n": 18 + 3}]


@pytest.mark.slow
def test_a_sweep_tests_whether_heads_are_constant(
    spec: ModelSpec, corpus_folder: Path, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall", "--limit", "4"]
    tasks += ["--store", str(store.path)]
    mean = ["--replace", "mean", "--corpus", str(corpus_folder)]
    arms = ["--scores", "output_norm_ln", "--quantiles", "0.2", "--controls", "1", "--no-confirm"]
    for value in ([], mean):
        assert main(["sweep", spec.source, *tasks, *arms, *value]) == 0
    found = store.query("select run_id, kind, replacement from arms where kind <> 'baseline'").to_pylist()
    kinds = ("rule", "mask", "random_rule", "random_mask")
    assert Counter((row["kind"], row["replacement"]) for row in found) == Counter(product(kinds, ("zero", "mean")))
    assert len({(row["run_id"], row["replacement"]) for row in found}) == 2, "each value has curves of its own"
    [mask] = store.query("select mask_id from arms where kind = 'mask' and replacement = 'mean'").to_pylist()
    # An arm of the same heads and value has the same answers.
    assert main(["evaluate", spec.source, *tasks, "--mask", mask["mask_id"], *mean]) == 0
    ours = store.query(
        "select a.* exclude (arm_id) from answers a join arms using (arm_id) where kind = 'mask' and replacement ="
        " 'mean' order by arms.name, task, question"
    ).to_pylist()
    assert ours[: len(ours) // 2] == ours[len(ours) // 2 :] != []


def test_a_mask_of_the_store_is_evaluated(
    spec: ModelSpec, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    asked += ["--store", str(store.path), "--limit", "2"]
    assert main([*asked, "--heads", "0:1,1:2"]) == 0
    printed = capsys.readouterr().out
    ((name, mask),) = (tuple(row.values()) for row in store.query("select name, mask_id from masks").to_pylist())
    for given in (name, mask):
        assert main([*asked, "--mask", given]) == 0
        assert capsys.readouterr().out == printed, "the same run has the answers already"
    fails(capsys, [*asked, "--mask", "theirs"], "theirs")


def test_bad_options_name_their_fix(
    spec: ModelSpec, task_folder: Path, corpus_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", str(store.path)]
    tasks = ["--tasks", "counting", "--include-path", str(task_folder), *at]
    corpus = ["--corpus", str(corpus_folder)]
    fails(capsys, ["ablate", spec.source, *at], "--tasks or --corpus is required, or --data")
    fails(capsys, ["ablate", spec.source, *tasks, "--replace", "mean"], "needs texts: no corpus. Set --corpus")
    fails(capsys, ["ablate", spec.source, *tasks, *corpus], "--corpus has no effect on --replace zero")
    fails(capsys, ["ablate", spec.source, *tasks, "--sequences", "3"], "--sequences has no effect with --tasks")
    fails(capsys, ["evaluate", spec.source, *tasks, "--replace", "mean", "--heads", "0:1"], "Set --corpus")
    fails(capsys, ["evaluate", spec.source, *tasks, *corpus, "--heads", "0:1"], "--corpus has no effect on --replace")
    fails(capsys, ["evaluate", spec.source, *tasks, *corpus, "--replace", "mean"], "needs ablated heads")
    fails(capsys, ["sweep", spec.source, *tasks, *corpus], "--corpus has no effect on --replace zero")
    fails(capsys, ["sweep", spec.source, *tasks, "--replace", "mean"], "needs texts: no corpus. Set --corpus")
    fails(capsys, ["rank", "--by", "effect", *at], "Run `headscan ablate` first")
    generating = ["evaluate", spec.source, "--tasks", "telling", "--include-path", str(task_folder), "--no-recall", *at]
    fails(capsys, [*generating, "--heads", "0:1", "--replace", "resample", *corpus], "but a task generates text")


def test_only_named_heads_are_measured(
    spec: ModelSpec, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"corpus": CorpusSpec(str(corpus_folder)), "sequences": 4, "max_tokens": 40}
    named = Ablate(spec, heads=((2, 1), (0, 0)), **texts).run(tmp_path / "s.duckdb").effects
    every = {(e.layer, e.head): e for e in Ablate(spec, **texts).run(tmp_path / "all.duckdb").effects}
    assert {(e.layer, e.head) for e in named} == {(0, 0), (2, 1)}
    for effect in named:
        assert effect.effect == pytest.approx(every[effect.layer, effect.head].effect, abs=1e-6)
    with pytest.raises(InterventionError, match="`all_but_one` compares all heads of a layer"):
        Ablate(spec, heads=((0, 0),), all_but_one=True, **texts)
    given = ["ablate", spec.source, "--corpus", str(corpus_folder), "--store", str(tmp_path / "s.duckdb")]
    fails(capsys, [*given, "--heads", "9:0"], "no head 9:0 in the model: layer 9 (limit 2)")
    fails(capsys, [*given, "--heads", "0.1"], "--heads")
