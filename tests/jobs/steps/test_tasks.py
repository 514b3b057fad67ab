"""Requests, answers and results of tasks and groups equal lm-eval's own for every kind of task and prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

import headscan
from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, Arm, Intervention, criterion_masks, mask_arm, random_controls, rules_by_score
from headscan.engine.likelihood import likelihoods
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, StoreError
from headscan.model_spec import ModelSpec
from headscan.runs.head_orders import find_run
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import HarnessError, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.steps.run_scan import run_scan
from headscan.steps.scan import Scan
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig
from headscan.texts.harness import HeadscanLM
from headscan.texts.tasks import Questions, Tasks
from headscan.texts.token_requests import LogLikelihood, Request, Responses, input_key
from headscan.verdicts.judge import judge
from tests.jobs.conftest import TEXTS, THREADS, run_on, write_task, zeroed_by_hand

pytestmark = pytest.mark.usefixtures("own_tasks_alone")

#: Like the templates of some models, it accepts no system role, which task descriptions use.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_spec(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny-llama-chat"
    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return ModelSpec(str(folder))


def config(spec: ModelSpec, folder: Path, *names: str, **options: Any) -> Evaluate:
    return Evaluate(spec, TaskConfig(names, include_path=str(folder), **options), recall=None)


def of_lm_eval(
    spec: ModelSpec, folder: Path, names: Sequence[str], heads: Sequence[tuple[int, int]] = (), **options: Any
) -> Any:
    lm = headscan.load(spec.source)
    # It would query the whole machine.
    with patch("lm_eval.evaluator.add_env_info"), zeroed_by_hand(lm, heads):
        return simple_evaluate(
            model=HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=4, max_length=lm.max_tokens),
            tasks=list(names),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=1000,
            **options,
        )


def check(store: Store, theirs: Any, arm: str = "baseline") -> None:
    """An arm has lm-eval's results and answers."""
    rows = store.query("from arm_results join arms using (arm_id) where name = ?", [arm]).to_pylist()
    ours = {(row["task"], row["metric"], row["filter"]): row for row in rows}
    expected = {
        (task, *key.split(",")): (value, figures[key.replace(",", "_stderr,")], figures["sample_len"])
        for task, figures in theirs["results"].items()
        for key, value in figures.items()
        if "," in key and "_stderr," not in key
    }
    assert set(ours) == set(expected)
    for key, (value, error, questions) in expected.items():
        row = ours[key]
        assert row["value"] == pytest.approx(value, rel=1e-4), key
        assert row["standard_error"] == (None if error == "N/A" else pytest.approx(error, rel=1e-3)), key
        assert row["questions"] == questions
        assert row["is_group"] == (key[0] in theirs.get("groups", {}))
    answers = store.query("from answers join arms using (arm_id) where name = ?", [arm]).to_pylist()
    check_answers({(row["task"], row["question"]): row for row in answers}, theirs["samples"])


def check_answers(
    answers: Mapping[tuple[str, int], Mapping[str, Any]], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    assert set(answers) == {(task, sample["doc_id"]) for task, found in samples.items() for sample in found}
    for task, found in samples.items():
        for sample in found:
            if sample["filter"] != found[0]["filter"]:
                continue
            row = answers[task, sample["doc_id"]]
            assert row["doc_hash"] == sample["doc_hash"]
            assert row["target"] == str(sample["target"])
            metrics = json.loads(row["metrics"])
            assert list(metrics) == sample["metrics"]
            for name, value in metrics.items():
                if isinstance(sample[name], int | float):
                    assert value == pytest.approx(sample[name], rel=1e-4)


KINDS = ("numbers", "informed", "both_ways", "graded", "ending", "reading", "telling")


def test_results_of_every_kind_of_task_are_those_of_lm_eval(
    spec: ModelSpec, task_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run_evaluation(
        config(spec, task_folder, *KINDS, limit=100), run_on(InProcessPool(spec, THREADS), store), [BASELINE]
    )
    assert capsys.readouterr().out == ""
    check(store, of_lm_eval(spec, task_folder, KINDS, limit=100))
    answers = store.query("from answers order by task, question").to_pylist()
    correct = {name: [row["correct"] for row in answers if row["task"] == name] for name in (*KINDS, "counting", "few")}
    assert set(correct["graded"]) == set(correct["reading"]) == {None}
    by_size = store.query("select value from arm_results where is_group").to_pylist()
    assert by_size == [{"value": pytest.approx(sum(correct["counting"] + correct["few"]) / 16)}]
    assert sum(correct["counting"]) / 12 != sum(correct["few"]) / 4
    for name in ("counting", "few", "informed", "both_ways", "telling"):
        assert 0 < sum(correct[name]) < len(correct[name])
    for row in answers:
        if row["task"] in ("counting", "few", "informed", "both_ways"):
            values = row["log_likelihoods"]
            assert len(values) == 3
            assert row["response"] == str(values.index(max(values)))
            assert row["correct"] == (row["response"] == row["target"])


def test_results_with_examples_are_those_of_lm_eval(spec: ModelSpec, task_folder: Path, store: Store) -> None:
    names, options = ("numbers", "ending", "telling"), {"num_fewshot": 2, "limit": 5}
    run_evaluation(
        config(spec, task_folder, *names, **options), run_on(InProcessPool(spec, THREADS), store), [BASELINE]
    )
    drawn = {name: drawn_by_hand(task, 5) for name, task in loaded(task_folder, names).items()}
    check(store, of_lm_eval(spec, task_folder, names, num_fewshot=2, samples=drawn))
    assert store.query("from answers where task = 'counting'").num_rows == 5
    assert drawn["counting"] != list(range(5))


def loaded(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the tasks of lm-eval, members of groups included."""
    found = TaskManager(include_path=str(folder), include_defaults=False).load(list(names))
    return dict(found["tasks"])


def drawn_by_hand(task: Any, count: int) -> list[int]:
    """Return the numbers of the questions whose content has the smallest hashes, ascending."""

    def key(number: int) -> bytes:
        content = json.dumps(list(task.eval_docs)[number], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).digest()

    return sorted(sorted(range(len(list(task.eval_docs))), key=key)[:count])


def test_a_limit_draws_questions_by_their_content(spec: ModelSpec, tmp_path: Path) -> None:
    rows = [{"q": f"{n} comes before", "choices": [f" {n + 1}", f" {n - 1}"], "a": n % 2} for n in range(40)]
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    before: set[str] = set()
    for limit in (1, 7, 20, 40, 100):
        asked = []
        for order in (rows, rows[::-1]):
            folder = tmp_path / f"{limit}, {order[0]['q']}"
            folder.mkdir()
            write_task(folder, "own", order, choice | {"metric_list": [{"metric": "acc"}]})
            questions = Questions(TaskConfig(("own",), include_path=str(folder), limit=limit), None, identify(spec))
            asked.append(set(questions.requests))
            assert questions.tasks.questions == min(limit, 40)
        assert (asked[0] == asked[1] and asked[0] > before) or limit == 100
        before = asked[0]


def test_tasks_whose_likeliest_choice_is_the_answer(task_folder: Path, tmp_path: Path) -> None:
    def by_probability(*names: str, folder: Path = task_folder) -> bool:
        return Tasks(TaskConfig(names, include_path=str(folder))).by_probability

    rows = [{"q": "1 comes before", "choices": [" 2", " 10"], "a": 0}] * 4
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    write_task(tmp_path, "by_length", rows, choice | {"metric_list": [{"metric": "acc_norm"}]})
    assert not by_probability("by_length", folder=tmp_path)
    assert by_probability("counting", "few") and by_probability("both_ways") and by_probability("informed")
    for other in ("telling", "ending"):
        assert not by_probability(other) and not by_probability("counting", other)


def test_questions_that_are_in_the_texts_are_counted(tmp_path: Path) -> None:
    draw = random.Random(0)
    stories = [" ".join(f"word{draw.randrange(1_000)}" for _ in range(60)) for _ in range(30)]
    rows = [{"q": story, "choices": [" yes", " no"], "a": 0, "n": 3} for story in stories]
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    write_task(tmp_path, "own", rows, choice | {"metric_list": [{"metric": "acc"}]})
    tasks = Tasks(TaskConfig(("own",), include_path=str(tmp_path)))
    texts = [
        f"a heading\n\n{stories[4]}\nand an end",
        stories[7][: len(stories[7]) // 2],
        " ".join(stories[8].split()[:19]),
    ]
    line = tasks.overlap(texts, "the texts that measure")
    assert line == (
        "questions of own with more than 5 % of their runs of 20 words in the texts that measure: 2 of 30"
        " (at most 95.3 %)"
    )
    assert ": 0 of 30 (" in tasks.overlap([], "no text")


@pytest.mark.slow
@pytest.mark.parametrize("multiturn", [True, False])
def test_results_with_a_chat_template_are_those_of_lm_eval(
    chat_spec: ModelSpec, task_folder: Path, store: Store, multiturn: bool
) -> None:
    options = {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": multiturn}
    names = ("few", "described", "telling")
    run_evaluation(
        config(chat_spec, task_folder, *names, **options), run_on(InProcessPool(chat_spec, THREADS), store), [BASELINE]
    )
    check(store, of_lm_eval(chat_spec, task_folder, names, **options))
    tasks, adapter = Tasks(config(chat_spec, task_folder, "counting", **options).tasks), HeadscanLM(identify(chat_spec))
    tasks.collect(adapter)
    bos = adapter.tokenizer.bos_token_id
    for request in adapter.requests.values():
        assert request.ids.count(bos) == 1  # the template writes it, and the tokenizer not once more
        assert adapter.tokenizer.decode(request.ids).count("<user>") == (3 if multiturn else 1)


def test_requests_are_built_once_and_every_arm_is_graded_by_its_own_answers(
    spec: ModelSpec, task_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, tokenised = [], []
    build, encode = ConfigurableTask.construct_requests, HeadscanLM.tok_encode

    def counted(task: ConfigurableTask, doc: Any, ctx: Any, **options: Any) -> Any:
        built.append(doc)
        return build(task, doc, ctx, **options)

    def counted_encode(adapter: HeadscanLM, string: str, *args: Any, **options: Any) -> list[int]:
        tokenised.append(string)
        return encode(adapter, string, *args, **options)

    monkeypatch.setattr(ConfigurableTask, "construct_requests", counted)
    monkeypatch.setattr(HeadscanLM, "tok_encode", counted_encode)
    names, heads = ("counting", "reading", "telling"), [(1, 2), (1, 3)]
    mask = mask_arm(heads)
    run_evaluation(config(spec, task_folder, *names), run_on(InProcessPool(spec, THREADS), store), [BASELINE, mask])
    assert len(built) == 12 + 4 + 12
    # Of a question and its choice the tokenizer sees the question, and both together.
    assert len(tokenised) == 2 * 36 + 4 + 12
    check(store, of_lm_eval(spec, task_folder, names, heads), mask.name)
    assert store.query("select distinct log_likelihoods from answers where task = 'counting'").num_rows == 2 * 12


FUNCTIONS = """
import random

def mixed(docs):
    return docs.map(lambda doc: {"choices": random.sample(doc["choices"], 3)})

def ask(doc):
    return doc["q"] + " {}"
"""


def test_a_task_of_functions_that_draw_at_random_is_the_same_when_loaded_again(
    spec: ModelSpec, task_folder: Path, tmp_path: Path
) -> None:
    written = json.loads((task_folder / "counting.yaml").read_text()) | {"task": "drawing"}
    text = json.dumps(written | {"process_docs": "mixed", "doc_to_text": "ask"})
    for name in ("mixed", "ask"):
        text = text.replace(f'"{name}"', f"!function functions.{name}")
    (tmp_path / "drawing.yaml").write_text(text)
    found = []
    for ending in (".", ".", "!"):
        (tmp_path / "functions.py").write_text(FUNCTIONS.replace("{}", ending))
        sys.modules.pop(str(tmp_path / "functions"), None)  # another process loads them again, too
        questions = Questions(TaskConfig(("drawing",), include_path=str(tmp_path), limit=5), None, identify(spec))
        found.append((questions.fingerprint(), list(questions.requests)))
        random.random()
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]


GRADING = """
def right(answer):
    return {}

def grade(doc, results):
    return {"acc": right(results[0])}
"""


def graded_task(folder: Path, task_folder: Path, right: str, filters: Sequence[Any] = ()) -> TaskConfig:
    """A task that generates texts and grades them with a function and a helper of its own."""
    written = json.loads((task_folder / "telling.yaml").read_text()) | {"metric_list": [{"metric": "acc"}]}
    written |= {"task": "own", "process_results": "grade", "repeats": 2}
    written["filter_list"] = [{"name": "own", "filter": list(filters) or [{"function": "take_first"}]}]
    (folder / "own.yaml").write_text(json.dumps(written).replace('"grade"', "!function grading.grade"))
    (folder / "grading.py").write_text(GRADING.replace("{}", right))
    sys.modules.pop(str(folder / "grading"), None)
    return TaskConfig(("own",), include_path=str(folder), limit=5)


def test_grading_by_another_helper_is_another_evaluation(spec: ModelSpec, task_folder: Path, tmp_path: Path) -> None:
    found = []
    for right in ("len(answer) > 3", "len(answer) > 3", "len(answer) > 4"):
        questions = Questions(graded_task(tmp_path, task_folder, right), None, identify(spec))
        found.append((questions.fingerprint(), list(questions.requests)))
    assert found[0] == found[1]
    assert found[0][1] == found[2][1] and found[0][0] != found[2][0]


def test_filters_may_leave_several_texts(spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path) -> None:
    tasks = graded_task(tmp_path, task_folder, "0.5 * len(answer)", [{"function": "take_first_k", "k": 2}])
    run = run_on(InProcessPool(spec, THREADS), store)
    run_evaluation(Evaluate(spec, tasks, recall=None), run, [BASELINE])
    rows = store.query("from answers").to_pylist()
    assert [row["correct"] for row in rows] == [1.0] * 5  # of two texts each
    assert all(row["response"].startswith("[") and row["log_likelihoods"] == [] for row in rows)


def test_exceptions_of_a_tasks_code_are_one_line(
    spec: ModelSpec, task_folder: Path, store: Store, tmp_path: Path
) -> None:
    tasks = graded_task(tmp_path, task_folder, "1 / 0")
    with pytest.raises(HarnessError, match=r"^the answers to own cannot be graded: division by zero$"):
        run_evaluation(Evaluate(spec, tasks, recall=None), run_on(InProcessPool(spec, THREADS), store), [BASELINE])


def test_tasks_that_take_no_examples_are_named(spec: ModelSpec, task_folder: Path, tmp_path: Path) -> None:
    bare = json.loads((task_folder / "few.yaml").read_text()) | {"task": "bare", "num_fewshot": 0}
    (tmp_path / "bare.yaml").write_text(json.dumps(bare))
    for examples, notes in (
        (2, ["bare: no examples in the prompt, as the task specifies; num_fewshot is ignored"]),
        (0, []),
    ):
        questions = Questions(TaskConfig(("bare",), str(tmp_path), num_fewshot=examples), None, identify(spec))
        assert questions.notes == notes


@pytest.mark.parametrize(("bos", "begins"), [("auto", True), ("always", True), ("never", False)])
def test_bos_is_added_where_requested(spec: ModelSpec, task_folder: Path, bos: str, begins: bool) -> None:
    adapter = HeadscanLM(identify(spec), bos=bos)
    Tasks(config(spec, task_folder, "counting", "telling").tasks).collect(adapter)
    assert {request.ids[0] == adapter.tokenizer.bos_token_id for request in adapter.requests.values()} == {begins}


# User errors


def test_tasks_that_cannot_be_put_are_refused(spec: ModelSpec, task_folder: Path, tmp_path: Path) -> None:
    pool, store = InProcessPool(spec, THREADS), Store(tmp_path / "s.duckdb")

    def refused(message: str, *names: str, **options: Any) -> None:
        with pytest.raises(HarnessError, match=message) as problem:
            run_evaluation(config(spec, task_folder, *names, **options), run_on(pool, store), [BASELINE])
        assert "\n" not in str(problem.value)

    refused("`fewshot_as_multiturn=True` needs a chat template", "counting", fewshot_as_multiturn=True)
    refused("has no chat template. Omit `apply_chat_template`", "counting", apply_chat_template=True)
    refused("generates up to 1024 tokens, and tiny-llama has 1024 positions", "endless")
    refused(r"`num_fewshot=-1` \(limit 0\)", "counting", num_fewshot=-1)
    refused(f"unknown task 'contin': did you mean counting.* {task_folder} has .*counting.* of lm-eval$", "contin")
    with pytest.raises(HarnessError, match=r"unknown task 'zzzz'\. Set `include_path` to the folder of its YAML file$"):
        Tasks(TaskConfig(("zzzz",)))
    refused("no tasks. Name at least one in `tasks`")
    (tmp_path / "broken.yaml").write_text((task_folder / "few.yaml").read_text().replace("few", "broken"))
    with pytest.raises(HarnessError, match=r"^broken cannot be loaded: "):
        Tasks(TaskConfig(("broken",), include_path=str(tmp_path)))
    rows = [{"q": "1", "choices": [" 2", " 3"], "a": 0}]  # which lm-eval takes for a number
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    write_task(tmp_path, "odd", [{**rows[0], "q": "one"}, *rows], choice)
    tasks = Tasks(TaskConfig(("odd",), include_path=str(tmp_path)))
    with pytest.raises(HarnessError, match=r"^the requests of odd cannot be made: Context is not a string"):
        tasks.collect(HeadscanLM(identify(spec)))
    assert not store.path.exists()


PAIRS = [
    ("ada counts to 3: 0 1", " 2"),
    ("ada counts to 12: 0 1 2 3 4 5 6", " 7 8 9 10 11"),
    ("", "bo counts"),
    ("cy ", "counts to 5"),
    (TEXTS[2] * 80, " again and again"),
]


def requests(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i, ("task", i, 1)) for i, pair in enumerate(pairs)]


def hugging_face(lm: headscan.LoadedModel) -> HFLM:
    return HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=2, max_length=lm.max_tokens)


def collected(spec: ModelSpec, pairs: list[tuple[str, str]]) -> tuple[HeadscanLM, tuple[Request, ...]]:
    adapter = HeadscanLM(identify(spec))
    adapter.loglikelihood(requests(pairs))
    found = [request for request in adapter.requests.values() if isinstance(request, Request)]
    assert len(found) == len(pairs)
    return adapter, tuple(found)


def answered(
    lm: headscan.LoadedModel, found: tuple[Request, ...], ablated: Intervention | None, batch_tokens: int, share: bool
) -> Responses[LogLikelihood]:
    return likelihoods(lm, found, ablated, batch_tokens, share)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 300, 100_000])
def test_log_likelihoods_are_those_of_lm_eval(spec: ModelSpec, batch_tokens: int, share: bool) -> None:
    lm = headscan.load(spec.source)
    theirs = hugging_face(lm).loglikelihood(requests(PAIRS), disable_tqdm=True)
    adapter, found = collected(spec, PAIRS)
    ours = answered(lm, found, None, batch_tokens, share)
    assert ours.ablated_shares == (0.0,) * len(PAIRS)
    adapter.answers = dict(zip(adapter.requests, ours.values, strict=True))
    for (a, greedy_a), (b, greedy_b) in zip(adapter.loglikelihood(requests(PAIRS)), theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy_a == greedy_b
    assert len(adapter.truncated) == 1


def test_a_request_without_tokens_names_its_task_and_document(spec: ModelSpec) -> None:
    adapter = HeadscanLM(identify(spec), bos="never")
    with pytest.raises(
        HarnessError, match=r"^task task, document 1: cannot score '', which has 0 tokens \(limits 1 and"
    ):
        adapter.loglikelihood(requests([("ada", " 2"), ("bo counts", "")]))
    asked = Instance("generate_until", {}, ("", {"until": ["x"]}), 0, ("telling", 7, 1))
    with pytest.raises(HarnessError, match=r"^task telling, document 7: the prompt has 0 tokens \(limit 1\)"):
        adapter.generate_until([asked])


@pytest.mark.parametrize(
    "ablated",
    [
        headscan.HeadMask([(0, 1), (2, 4)]),
        headscan.HeadRule("output_norm_ln", threshold=0.9),
        headscan.RandomHeads(0.3, seed=1),
    ],
)
def test_arms_ablate_heads_in_every_request(spec: ModelSpec, ablated: Intervention) -> None:
    lm = headscan.load(spec.source)
    tokenizer = lm.require_tokenizer()
    _, found = collected(spec, PAIRS[:2])
    ours = answered(lm, found, ablated, 200, share=True)
    for (context, continuation), answer, share in zip(PAIRS[:2], ours.values, ours.ablated_shares, strict=True):
        ids = tokenizer(context + continuation)["input_ids"]
        start = len(tokenizer(context)["input_ids"])
        # The last token is predicted, not read: a rule must not look at it.
        with torch.no_grad(), headscan.intervene(lm, ablated, input_keys=[input_key(ids[:-1])]) as record:
            logits = lm.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        assert share == pytest.approx(record.ablated_share)
        assert 0 < share < 1
        expected = sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids)))
        assert answer.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert answer.greedy_tokens == sum(int(logits[i - 1].argmax()) == ids[i] for i in range(start, len(ids)))


def test_arms_join_the_run_of_their_questions(
    spec: ModelSpec, pool: InProcessPool, task_folder: Path, store: Store
) -> None:
    asked, said, mask = config(spec, task_folder, "counting"), list[str](), mask_arm([(1, 2), (0, 0)])
    run_id = run_evaluation(asked, run_on(pool, store, say=said.append), [BASELINE, mask])
    assert [line.partition(": acc")[0] for line in said] == [f"run {run_id}", "baseline", mask.name]
    (judged,) = judge(store, run_id).arms
    assert (judged.paired.questions, judged.arm.ablated_share) == (12, pytest.approx(2 / 18))
    said.clear()
    more = Arm("rule", ArmKind.RULE, headscan.HeadRule("entropy", threshold=1.0), "entropy")
    assert run_evaluation(asked, run_on(pool, store, say=said.append), [BASELINE, mask, more]) == run_id
    assert said[:2] == ["baseline: finished before", f"{mask.name}: finished before"]
    assert store.query("from answers").num_rows == 36


def test_arms_are_chosen_from_a_scan_of_this_model(
    spec: ModelSpec, pool: InProcessPool, corpus_folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "s.duckdb")
    config = Scan(spec, CorpusSpec(str(corpus_folder)), TokenConfig(64))
    scanned = run_scan(config, run_on(pool, store))
    identity = identify(spec)
    assert find_run(store, identity, "output_norm_ln", None) == scanned.run_id
    arms = criterion_masks(store, scanned.run_id, "output_norm_ln", [0.2])
    arms += rules_by_score(store, scanned.run_id, "output_norm_ln", [0.2])
    arms += random_controls(headscan.load(spec.source).grid, arms, 3)
    assert [arm.kind for arm in arms] == ["mask", "rule", *3 * ["random_mask"], *3 * ["random_rule"]]
    assert {arm.share for arm in arms} == {0.2}
    sizes = {len(arm.intervention.heads) for arm in arms if isinstance(arm.intervention, headscan.HeadMask)}
    assert sizes == {4}
    assert len({arm.intervention for arm in arms}) == 8
    lowest = store.query("select layer, head from head_summary order by output_norm_ln limit 4").to_pylist()
    assert isinstance(arms[0].intervention, headscan.HeadMask)
    assert set(arms[0].intervention.heads) == {(row["layer"], row["head"]) for row in lowest}
    other = Store(tmp_path / "other.duckdb")
    with pytest.raises(StoreError):
        find_run(other, identity, "output_norm_ln", None)
    with pytest.raises(InterventionError, match=r"measured .*, another model than other"):
        find_run(
            store, dataclasses.replace(identity, name="other", config_hash="other"), "output_norm_ln", scanned.run_id
        )
    assert isinstance(arms[1].intervention, headscan.HeadRule) and arms[1].intervention.widths == headscan.MassWidths()
    narrow = dataclasses.replace(config, widths=headscan.MassWidths(2, 9))
    [rule] = rules_by_score(store, run_scan(narrow, run_on(pool, store)).run_id, "output_norm_ln", [0.2])
    assert isinstance(rule.intervention, headscan.HeadRule) and rule.intervention.widths == narrow.widths
    store.finish_run(scanned.run_id, status="failed")
    with pytest.raises(InterventionError, match=f"run {scanned.run_id} is failed. Run its command again"):
        find_run(store, identity, "output_norm_ln", scanned.run_id)


def test_arms_that_cannot_be_answered_are_refused(
    spec: ModelSpec, pool: InProcessPool, task_folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "s.duckdb")
    with pytest.raises(HeadIndexError, match="layer 7 has no attention heads"):
        run_evaluation(config(spec, task_folder, "counting"), run_on(pool, store), [BASELINE, mask_arm([(7, 0)])])
    with pytest.raises(HarnessError, match="is no folder"):
        run_evaluation(config(spec, tmp_path / "absent", "counting"), run_on(pool, store), [])
    with pytest.raises(InterventionError, match="empty mask"):
        mask_arm([])
    with pytest.raises(HeadscanError, match="limit=0"):
        TaskConfig(("counting",), limit=0)
    assert not store.path.exists()
