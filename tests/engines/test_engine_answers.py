"""The answers of `headscan evaluate` to 100 questions against those of engines that serve the same pruned model.

The folder of the engines' environments (``make engines``) is ``.engines``, or that of the variable HEADSCAN_ENGINES.
vLLM reads the DeciLM folder that headscan reads back; llama.cpp a GGUF file of the same model. Both get the requests of
needle questions as token ids: the answers are the engines' own log-probabilities of the choices. lm-eval with its own
model ``vllm`` gets a task in text.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import headscan
from headscan.cli.main import main
from headscan.models.loaded_model import LoadedModel
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.store.store import Store
from headscan.texts.continuation_task import DEMO_TASK, write_task
from headscan.texts.recall_tasks import recall_questions
from headscan.texts.stdlib_files import held_out_files
from tests.engines import ask_vllm
from tests.engines.check_engines import ENGINES, asked

_ENGINES = Path(os.environ.get("HEADSCAN_ENGINES", ".engines"))
_QUESTIONS, _LENGTH = 100, 128
#: Uneven groups, whole groups, and a layer without attention.
_REMOVED = [(0, 1), (1, 0), (1, 1), (2, 4), (2, 5), (2, 6), (2, 7), *((4, head) for head in range(8))]


def _pruned_demo() -> LoadedModel:
    return headscan.slice_heads(headscan.load("demo", device="cpu", dtype="float32"), _REMOVED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vLLM", "llama.cpp"])
def test_engines_give_the_same_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ENGINES[name]
    python = _ENGINES / engine.folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of {name} in {_ENGINES}")
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    lm = _pruned_demo()
    exported = engine.write(lm, None, tmp_path)
    model = exported
    if exported.is_file():  # headscan reads no GGUF file whose layers differ
        headscan.save_pruned(lm, model := tmp_path / "smaller")

    plan = RecallQuestions(lengths=(_LENGTH,), questions=_QUESTIONS)
    every = recall_questions(lm.require_tokenizer(), plan, lm.max_tokens, bos="auto")
    questions = [each for each in every if each.task.startswith("needle")]
    requests = [request for each in questions for request in each.requests]
    request = {
        "requests": requests,
        "candidates": lm.model.config.vocab_size,
        "tokens": 8 + max(len(each.ids) for each in requests),
    }
    answered = asked(engine, _ENGINES, exported, request)["log_likelihoods"]

    recall = ["--recall-lengths", str(_LENGTH), "--recall-questions", str(_QUESTIONS)]
    store = tmp_path / "s.duckdb"
    settings = ["--device", "cpu", "--dtype", "float32", "--limit", "4", "--store", str(store)]
    assert main(["evaluate", "demo", "--models", str(model), *recall, *settings]) == 0
    rows = Store(store).query(
        "select question, response, log_likelihoods from answers join arms using (arm_id)"
        f" where kind = 'model' and task = 'needle@{_LENGTH}' order by question"
    )
    ours = rows.to_pylist()
    whole = Store(store).query(
        "select log_likelihoods from answers join arms using (arm_id)"
        f" where kind = 'baseline' and task = 'needle@{_LENGTH}' order by question"
    )
    before = [row["log_likelihoods"] for row in whole.to_pylist()]
    assert max(abs(a[0] - b["log_likelihoods"][0]) for a, b in zip(before, ours, strict=True)) > 0.1
    assert len(ours) == len(questions) == _QUESTIONS
    chosen, at = 0, 0
    for row, question in zip(ours, questions, strict=True):
        theirs = answered[at : at + len(question.requests)]
        at += len(question.requests)
        assert theirs == pytest.approx(row["log_likelihoods"], abs=engine.limit)
        best, second = sorted(theirs, reverse=True)[:2]
        is_tie = best - second < 2 * engine.limit
        assert is_tie or theirs.index(best) == int(row["response"])
        chosen += theirs.index(best) == int(row["response"])
    assert chosen > 0.95 * _QUESTIONS


@pytest.mark.slow
def test_lm_eval_with_vllm_gives_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ENGINES["vLLM"]
    python = _ENGINES / engine.folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of vLLM in {_ENGINES}")
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    served = engine.write(_pruned_demo(), None, tmp_path)
    tasks = write_task(tmp_path / "task", held_out_files(), _QUESTIONS)

    arguments = {
        "pretrained": served,
        "trust_remote_code": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    words = [str(python), "-m", "lm_eval", "run", "--model", "vllm", "--batch_size", "auto", "--tasks", DEMO_TASK]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    words += ["--include_path", str(tasks), "--log_samples", "--output_path", str(tmp_path / "lm_eval")]
    ended = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ask_vllm.SETTINGS}
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    [file] = (tmp_path / "lm_eval").rglob(f"samples_{DEMO_TASK}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    theirs = {each["doc_id"]: each for each in samples}

    settings = ["--device", "cpu", "--dtype", "float32", "--no-recall", "--store", str(tmp_path / "s.duckdb")]
    words = ["evaluate", "demo", "--models", str(served), "--tasks", DEMO_TASK, "--include-path", str(tasks)]
    assert main([*words, *settings]) == 0
    ours = (
        Store(tmp_path / "s.duckdb")
        .query(
            "select question, correct, log_likelihoods from answers join arms using (arm_id)"
            " where kind = 'model' order by question"
        )
        .to_pylist()
    )
    assert len(ours) == len(theirs) == _QUESTIONS
    for row in ours:
        sample = theirs[row["question"]]
        # lm-eval lists the log-likelihoods of the choices, then those without the context, which the task subtracts.
        values = [float(answer[0]) for answer, *_ in sample["resps"]]
        raised = [a - b for a, b in zip(values[:4], values[4:], strict=True)]
        assert raised == pytest.approx(row["log_likelihoods"], abs=10 * engine.limit)
        assert sample["acc_mutual_info"] == row["correct"]
