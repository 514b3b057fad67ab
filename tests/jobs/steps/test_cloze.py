"""MMLU without letters in lm-eval's own form, and the index of lm-eval's tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest

from headscan.cluster.pool import InProcessPool
from headscan.engine.arms import BASELINE, mask_arm
from headscan.model_spec import ModelSpec
from headscan.settings.evaluation_settings import HarnessError, TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.store import Store
from headscan.texts.tasks import Tasks
from headscan.verdicts.judge import judge
from tests.jobs.conftest import THREADS, run_on, write_task
from tests.sources import SHARED

LETTERS = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nAnswer:",
    "doc_to_choice": ["A", "B"],
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
SUBJECTS = ("mmlu_tiny_sums", "mmlu_tiny_words")


@pytest.fixture
def mmlu(tmp_path: Path) -> Path:
    """A folder with a group of two subjects in MMLU's form."""
    folder = tmp_path / "mmlu"
    folder.mkdir()
    for name, questions in (
        (
            SUBJECTS[0],
            [{"question": f"{a} plus 1?", "choices": [str(a + 1), "no number"], "answer": 0} for a in range(6)],
        ),
        (SUBJECTS[1], [{"question": f"word {a}? ", "choices": ["a", f"letter {a}"], "answer": 1} for a in range(4)]),
    ):
        write_task(folder, name, questions, LETTERS)
    (folder / "group.yaml").write_text(json.dumps({"group": "mmlu_tiny", "task": list(SUBJECTS)}))
    return folder


def _loaded(folder: Path, *names: str, **options: Any) -> Tasks:
    return Tasks(TaskConfig(names, include_path=str(folder), mmlu_cloze=True, **options))


@pytest.mark.usefixtures("own_tasks_alone")
def test_the_cloze_form_asks_the_same_questions_without_letters(mmlu: Path) -> None:
    tasks = _loaded(mmlu, "mmlu_tiny")
    assert tasks.groups == {
        "mmlu_tiny": list(SUBJECTS),
        "mmlu_tiny_continuation": [f"{name}_continuation" for name in SUBJECTS],
    }
    cloze = tasks._loaded["tasks"]["mmlu_tiny_words_continuation"]
    cloze.build_all_requests()
    assert [instance.args for instance in cloze.instances[:2]] == [
        ("Question: word 0?\nAnswer:", " a"),
        ("Question: word 0?\nAnswer:", " letter 0"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("own_tasks_alone")
def test_the_likeliest_answer_by_length_counts_and_both_forms_are_judged(
    spec: ModelSpec, mmlu: Path, store: Store
) -> None:
    config = Evaluate(spec, TaskConfig(("mmlu_tiny",), include_path=str(mmlu), mmlu_cloze=True), recall=None)
    run_id = run_evaluation(config, run_on(InProcessPool(spec, THREADS), store), [BASELINE, mask_arm([(0, 1)])])
    rows = store.query(
        "SELECT task, target, response, correct, log_likelihoods, metrics FROM answers JOIN arms USING (arm_id)"
        " WHERE name = 'baseline' AND task = 'mmlu_tiny_words_continuation' ORDER BY question"
    ).to_pylist()
    assert len(rows) == 4
    for row in rows:
        short, long = row["log_likelihoods"]
        assert row["correct"] == float(long / len("letter 0") > short / len("a")) == (row["response"] == row["target"])
        assert list(json.loads(row["metrics"])) == ["acc_norm"]
    (arm,) = judge(store, run_id).arms
    assert {task.task for task in arm.tasks} == {
        *SUBJECTS,
        *(f"{name}_continuation" for name in SUBJECTS),
        "mmlu_tiny",
        "mmlu_tiny_continuation",
    }
    assert arm.paired.questions == 20


def test_the_form_is_that_of_lm_eval() -> None:
    """Of lm-eval's own description of mmlu_continuation; its data are not needed for that."""
    from lm_eval.tasks._yaml_loader import load_yaml

    from headscan.texts.tasks import _FORM

    # The index of all tasks takes seven seconds.
    path = Path(lm_eval.tasks.__file__).parent / "mmlu" / "continuation" / "mmlu_anatomy.yaml"
    theirs = load_yaml(path, resolve_func=False, recursive=True)
    for key in ("output_type", "doc_to_text", "doc_to_choice", "doc_to_target"):
        assert theirs[key] == _FORM[key]
    assert theirs["task"] == "mmlu_anatomy_continuation"
    assert theirs["fewshot_config"] == {"sampler": "first_n"}


def test_a_subject_of_mmlu_has_its_examples_in_the_cloze_form() -> None:
    folder = SHARED / "mmlu/tasks"
    if not folder.is_dir():
        pytest.skip("needs MMLU beside the repository")
    tasks = _loaded(folder, "mmlu_local_anatomy", num_fewshot=1, limit=1)
    cloze = tasks._loaded["tasks"]["mmlu_local_anatomy_continuation"]
    cloze.build_all_requests(limit=1)
    prompt, answer = cloze.instances[0].args
    assert prompt.startswith(
        "The following are multiple choice questions (with answers) about anatomy.\n\nQuestion: What is the"
        " embryological origin of the hyoid bone?\nAnswer: The second and third pharyngeal arches\n\nQuestion: "
    )
    assert prompt.endswith("\nAnswer:") and answer == " paralysis of the facial muscles."


@pytest.mark.usefixtures("own_tasks_alone")
def test_tasks_that_ask_for_no_letters_are_refused(task_folder: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"^`mmlu_cloze=True` needs a task with the letters of MMLU, not only counting. Add "
    ):
        _loaded(task_folder, "counting")


@pytest.mark.parametrize(
    ("name", "all_of_them"),
    [("counting", False), ("mine", True)],  # a group may have members among lm-eval's own
)
def test_the_index_of_a_folder_is_enough_for_its_tasks(
    name: str, all_of_them: bool, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in task_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mine.yaml").write_text(json.dumps({"group": "mine", "task": ["counting"]}))
    own, made = lm_eval.tasks.TaskManager, []
    own = getattr(own, "func", own)  # `own_tasks_alone` binds an argument

    class Counted(own):  # type: ignore[misc, valid-type]
        def __init__(self, include_path: str, include_defaults: bool = True) -> None:
            made.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=False)  # their index takes seven seconds

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Counted)
    tasks = Tasks(TaskConfig((name,), include_path=str(tmp_path)))
    assert tasks.groups == ({"mine": ["counting"]} if all_of_them else {})
    assert made == [False, True][: 1 + all_of_them]
