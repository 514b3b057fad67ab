"""Thresholds, arms and ablated heads of a sweep equal values that are computed directly."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import headscan
from headscan.catalog import SCORES, Score, statistics_for
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool
from headscan.demo import MODEL_FOLDER
from headscan.engine.arms import BASELINE, mask_arm
from headscan.errors import HeadscanError, InterventionError, UnknownNameError, UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.ranking.head_ranking import rank_heads
from headscan.runs.head_orders import find_run
from headscan.runs.model_identity import identify, model_facts
from headscan.settings.evaluation_settings import RecallQuestions, TaskConfig
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_sweep import SweepResult, _size, run_sweep, size_recall
from headscan.steps.sweep import Sweep
from headscan.store.store import Store
from headscan.texts.harness import HeadscanLM
from headscan.texts.tasks import Tasks
from headscan.texts.token_requests import Request
from tests.jobs.conftest import THREADS, make_tokenizer, run_on, write_task
from tests.small_models import make_model
from tests.stores import copy_store


class Swept(NamedTuple):
    """A sweep's store, its result, and its printed lines."""

    store: Store
    result: SweepResult
    said: list[str]


#: Low is inactive in the first, high in the second.
RULES = ("output_norm_ln", "first_token_weight")


@pytest.fixture(scope="module")
def config(spec: ModelSpec, task_folder: Path) -> Sweep:
    tasks = TaskConfig(("counting",), include_path=str(task_folder))
    return Sweep(spec, tasks, recall=None, scores=RULES, shares=(0.0, 0.2, 0.4), controls=2)


@pytest.fixture(scope="module")
def swept(config: Sweep, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    store, said = Store(copy_store(empty_store, tmp_path_factory.mktemp("swept"))), list[str]()
    result = run_sweep(config, run_on(InProcessPool(config.model, THREADS), store, say=said.append))
    return Swept(store, result, said)


@pytest.fixture(scope="module")
def requests(config: Sweep) -> list[Request]:
    adapter = HeadscanLM(identify(config.model))
    Tasks(config.tasks).collect(adapter)
    return [request for request in adapter.requests.values() if isinstance(request, Request)]


def arms_of(store: Store) -> list[dict[str, Any]]:
    return store.query("from arms order by name").to_pylist()


def test_arms_are_every_score_and_control_at_every_share(swept: Swept) -> None:
    store, result, said = swept
    arms = arms_of(store)
    assert Counter((arm["kind"], arm["share"], arm["criterion"]) for arm in arms) == {
        ("baseline", None, None): 1,
        **{("rule", share, score): 1 for share in (0.2, 0.4) for score in RULES},
        **{("mask", share, "output_norm_ln"): 1 for share in (0.2, 0.4)},
        **{(kind, share, None): 2 for kind in ("random_rule", "random_mask") for share in (0.2, 0.4)},
    }
    assert {arm["status"] for arm in arms} == {"finished"}
    marks = store.query("SELECT kind = 'baseline' AS whole, config ->> '$.swept' AS swept FROM arms GROUP BY ALL")
    assert {tuple(row.values()) for row in marks.to_pylist()} == {(True, None), (False, "true")}
    assert "15 arms: the baseline, 4 rules, 2 masks, 8 random controls" in said
    sizes = store.query(
        "select share, kind, count(*) / count(distinct mask_id) as heads from arms join mask_heads using (mask_id)"
        " group by all order by all"
    ).to_pylist()
    assert [(row["share"], row["kind"], row["heads"]) for row in sizes] == [
        (share, kind, heads) for share, heads in ((0.2, 4), (0.4, 7)) for kind in ("mask", "random_mask")
    ]
    assert all(
        store.resolve_run(run, kind)["status"] == "finished"
        for run, kind in zip((result.scan_run, result.verdict.run_id), ("recording", "evaluate"), strict=True)
    )
    assert "\n\nsafe within one point, confirmed on other questions: " in str(result)
    assert result._repr_html_().startswith('<pre style="white-space: pre">')


def test_thresholds_are_quantiles_of_the_scores_of_all_distinct_prompts(
    config: Sweep, swept: Swept, requests: list[Request]
) -> None:
    prompts = sorted({request.ids[:-1] for request in requests})
    assert len(prompts) < len(requests)
    lm = headscan.load(config.model.source)
    measured = [headscan.collect(lm, torch.tensor([ids]), statistics=statistics_for(RULES)) for ids in prompts]
    for arm in arms_of(swept.store):
        if arm["kind"] == "rule":
            pool = torch.cat([headscan.score(one, arm["criterion"]) for one in measured]).double().flatten().numpy()
            share = 1 - arm["share"] if SCORES[arm["criterion"]].inactive == "high" else arm["share"]
            assert arm["threshold"] == pytest.approx(np.quantile(pool, share), rel=1e-4)


def test_rules_ablate_the_same_heads_when_every_prompt_runs_alone(
    config: Sweep, swept: Swept, requests: list[Request]
) -> None:
    lm = headscan.load(config.model.source)
    for arm in arms_of(swept.store):
        if arm["kind"] == "rule":
            shares = []
            for request in requests:
                with (
                    torch.no_grad(),
                    headscan.intervene(lm, headscan.HeadRule(arm["criterion"], arm["threshold"])) as done,
                ):
                    lm.model(torch.tensor([request.ids[:-1]]))
                shares.append(done.ablated_share)
            assert arm["ablated_share"] == pytest.approx(np.mean(shares), abs=1e-9)
            assert arm["ablated_share"] == pytest.approx(arm["share"], abs=0.15)


def test_a_score_that_rules_cannot_measure_is_refused_before_prompts_are_recorded(
    config: Sweep, pool: InProcessPool, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Score("added", paper_name="-", statistic="confidence", inactive="low", source="test")
    monkeypatch.setitem(SCORES, "added", added)
    store = Store(copy_store(empty_store, tmp_path / "s.duckdb"))
    with pytest.raises(InterventionError, match="ablations by score measure no score on confidence"):
        run_sweep(dataclasses.replace(config, scores=("added",)), run_on(pool, store))
    assert not store.runs()


def test_masks_are_the_first_heads_of_the_recordings_ranking(swept: Swept) -> None:
    store, result, _ = swept
    ranked = [(head.layer, head.head) for head in rank_heads(store, result.scan_run, "output_norm_ln")]
    for arm in arms_of(store):
        if arm["kind"] == "mask":
            heads = store.mask(arm["mask_id"]).heads
            assert set(heads) == set(ranked[: len(heads)])
            assert arm["ablated_share"] == pytest.approx(len(heads) / 18)


def test_a_recording_is_a_scan_to_choose_heads_from_if_it_is_named(
    config: Sweep, swept: Swept, requests: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    store, result, _ = swept
    prompts = {request.ids[:-1] for request in requests}
    rows = store.query("select count(*) as n, count(distinct sequence) as s from head_statistics").to_pylist()
    assert rows == [{"n": 18 * len(prompts), "s": len(prompts)}]
    assert find_run(store, identify(config.model), "entropy", result.scan_run[:6]) == result.scan_run
    assert store.resolve_run(result.scan_run[:6])["corpus"] == "prompts of counting"
    assert (
        main(["rank", "--by", "output_norm_ln", "--run", result.scan_run, "--limit", "3", "--store", str(store.path)])
        == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


def test_the_command_of_a_finished_sweep_runs_nothing_and_prints_every_curve(
    config: Sweep, swept: Swept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, result, _ = swept
    asked = []
    map_items = InProcessPool.map

    def counted(pool: InProcessPool, task: Any, items: Any) -> Any:
        asked.append(task)
        return map_items(pool, task, items)

    monkeypatch.setattr(InProcessPool, "map", counted)
    monkeypatch.setattr("headscan.cluster.devices.usable_cores", lambda: 1)
    command = ["sweep", config.model.source, "--tasks", "counting", "--include-path", config.tasks.include_path]
    command += ["--no-recall", "--device", "cpu", "--store", store.path, "--scores", ",".join(RULES)]
    command += ["--shares", "0,0.2,0.4", "--controls", "2"]
    assert main([str(part) for part in command]) == 0
    assert asked == [model_facts]
    out, err = capsys.readouterr()
    said = err.splitlines()
    assert f"run {result.scan_run}: the prompts of counting were recorded before" in said
    assert sorted(line for line in said if "finished" in line) == [
        f"{arm['name']}: finished before" for arm in arms_of(store)
    ]
    assert f"scan {result.scan_run} and sweep {result.verdict.run_id} in {store.path}" in out
    table, _, choices = out.partition("Closest of")
    rows = {
        tuple(line.split()[:2]) for line in table.rpartition("\n")[0].splitlines() if "mask" in line or "rule" in line
    }
    random = {("random", "random_rule"), ("random", "random_mask")}
    assert rows == random | {*((name, "rule") for name in RULES), ("output_norm_ln", "mask")}
    questions = store.query("select count(*) as n from question_split").to_pylist()[0]["n"]
    assert f"Both use all {questions} questions and are not corrected\nfor comparing 5 curves." in table
    half = questions // 2
    assert (
        f"4 rules, none of which is safe, selected on {half} questions and judged on {questions - half} others"
        in choices
    )
    assert "safe within one point, confirmed on other questions: no arm" in choices
    # Without confirmation nothing runs again either, and the output describes the interval.
    assert main([str(part) for part in (*command, "--no-confirm")]) == 0
    assert asked == [model_facts] * 2
    out, err = capsys.readouterr()
    assert f"selected and judged on the same {questions} questions, so its interval is not corrected" in out
    assert "safe within one point, not corrected for the selection: no arm" in out
    warning = "each half of the questions has about "
    assert any(line.startswith(warning) for line in swept.said) and warning not in err


# Recall: the whole model is asked first


def test_the_whole_model_is_asked_before_any_arm_runs(config: Sweep, tmp_path: Path) -> None:
    """A model of random weights is at chance, which a sweep reports first; the same command again asks nothing."""
    recall = RecallQuestions(lengths=(256,), questions=8)
    store, pool = Store(tmp_path / "s.duckdb"), InProcessPool(config.model, THREADS)
    small = dataclasses.replace(config, recall=recall, scores=RULES[:1], shares=(0.2,), mask_criteria=(), controls=0)
    for _ in range(2):
        said: list[str] = []
        result = run_sweep(small, run_on(pool, store, say=said.append))
        lines = [line for line in said if line.startswith("the whole model ")]
        assert [line.rpartition(": ")[2] for line in lines] == [
            "too few to judge needle recall, so no arm is judged by it",
            "too few to judge copying recall, so no arm is judged by it",
        ]
        assert said.index(lines[-1]) < next(n for n, line in enumerate(said) if " arms: the baseline" in line)
    assert [run["kind"] for run in store.runs()].count("recall") == 1
    (asked,) = store.query(
        "SELECT count(*) AS asked FROM answers JOIN arms USING (arm_id) JOIN runs USING (run_id)"
        " WHERE runs.kind = 'recall'"
    ).to_pylist()
    assert asked["asked"] == 16
    assert result.verdict.run_id == store.resolve_run(None, "evaluate")["run_id"]


@pytest.mark.parametrize(
    ("kind", "right", "asked", "fixed", "number", "says"),
    [
        ("needle", 98.0, 400, False, 464, "464 needle questions instead of 400, to show that an arm keeps that"),
        ("needle", 50.0, 400, False, 1324, "the whole model finds 50 % of the needles: 1,324 needle questions instead"),
        ("copying", 90.0, 400, False, 400, "400 copying questions can show that an arm keeps that"),
        (
            "copying",
            30.0,
            400,
            False,
            1072,
            "the whole model copies 30 % of the tokens: 1,072 copying questions instead",
        ),
        ("copying", 4.0, 400, False, 400, "the whole model copies 4 % of the tokens: too few to judge copying recall"),
        ("needle", 50.0, 400, True, 400, r"cannot show that an arm keeps that, not even with identical answers"),
        ("needle", 90.0, 400, True, 400, "400 needle questions can show"),
    ],
)
def test_recall_questions_follow_from_what_the_whole_model_recalls(
    kind: str, right: float, asked: int, fixed: bool, number: int, says: str
) -> None:
    """A quarter of the texts selects, and a rule and a mask are judged."""
    found, line = _size(kind, right, asked, 0.75, 2, fixed=fixed)
    assert (found, says in line) == (number, True), (found, line)


@pytest.mark.slow
def test_a_model_that_recalls_little_is_asked_more(tmp_path: Path) -> None:
    spec = ModelSpec(str(MODEL_FOLDER), dtype="float32")
    config = Sweep(spec, TaskConfig(("counting",)), RecallQuestions(lengths=(256,)))
    run = run_on(InProcessPool(spec, THREADS), Store(tmp_path / "s.duckdb"))
    sized = size_recall(config, run, judging_share=0.75, comparisons=2)
    assert sized.recall is not None and sized.recall.in_all is not None
    needles, copies = sized.recall.in_all.values()
    assert 400 < needles < 1000 and 400 < copies < 1000
    assert dataclasses.replace(sized, recall=config.recall) == config


# User errors


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"shares": (0.1, 1.5)}, InterventionError, r"`shares=1\.5` \(limit below 1\)"),
        ({"shares": (-0.1,)}, InterventionError, r"`shares=-0\.1` \(limit 0\)"),
        ({"shares": (1.0,)}, InterventionError, r"`shares=1` \(limit below 1\)"),
        ({"shares": (0.0,)}, InterventionError, "nothing to sweep: no score, or no share above 0"),
        ({"scores": (), "mask_criteria": ()}, InterventionError, "nothing to sweep"),
        ({"scores": ("output_nrom",)}, UnknownNameError, "output_norm"),
        ({"mask_criteria": ("",)}, UnknownNameError, "unknown criterion ''"),
        ({"controls": -1}, InterventionError, "controls=-1"),
        ({"corpus": "texts/"}, InterventionError, "`corpus` has no effect without a replacement by texts"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(
    config: Sweep, wrong: dict[str, Any], error: type[HeadscanError], says: str
) -> None:
    with pytest.raises(error, match=says):
        dataclasses.replace(config, **wrong)


def test_masks_of_all_heads_are_refused_before_anything_is_recorded(config: Sweep, tmp_path: Path) -> None:
    store, pool = Store(tmp_path / "s.duckdb"), InProcessPool(config.model, THREADS)
    with pytest.raises(InterventionError, match="a mask of 99 % ablates all 18 heads of the model"):
        run_sweep(dataclasses.replace(config, shares=(0.1, 0.99)), run_on(pool, store))
    with pytest.raises(InterventionError, match=r"ablates all 18 heads of the model \(limit 17\). Use fewer heads"):
        run_evaluation(config, run_on(pool, store), [BASELINE, mask_arm([divmod(n, 6) for n in range(18)])])
    assert not store.path.exists()


def test_whole_layers_and_cut_prompts_are_reported(config: Sweep, store: Store, tmp_path: Path) -> None:
    rows = [{"q": f"{'again ' * 700 * (n < 2)}and {n}", "choices": [" 1", " 2"], "a": 0} for n in range(4)]
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    write_task(tmp_path, "long", rows, choice)
    tasks = TaskConfig(("long",), include_path=str(tmp_path))
    said: list[str] = []
    pool = InProcessPool(config.model, THREADS)
    arms = [BASELINE, mask_arm([*((1, head) for head in range(6)), (0, 0)])]
    small = dataclasses.replace(config, tasks=tasks)
    run_evaluation(small, run_on(pool, store, say=said.append), arms)
    assert said[0] == "prompts longer than the context, whose beginning is cut off: 2"
    assert said[1] == f"{arms[1].name} ablates every head of layer 1"


def test_an_encoder_is_refused(task_folder: Path, tmp_path: Path) -> None:
    make_model("bert", vocabulary=300).save_pretrained(tmp_path / "tiny-bert")
    make_tokenizer(300).save_pretrained(tmp_path / "tiny-bert")
    spec, store = ModelSpec(str(tmp_path / "tiny-bert")), Store(tmp_path / "s.duckdb")
    config = Sweep(spec, TaskConfig(("few",), include_path=str(task_folder)), recall=None)
    with pytest.raises(UnsupportedModelError, match="tiny-bert does not predict the next token"):
        run_sweep(config, run_on(InProcessPool(spec, THREADS), store))
    with pytest.raises(UnsupportedModelError, match="tiny-bert does not predict the next token"):
        run_evaluation(config, run_on(InProcessPool(spec, THREADS), store), [BASELINE])
    assert not store.path.exists()
