"""MMLU without letters: answered by the likelihood of answer texts.

Naming the letter of an answer needs heads that knowing the answer does not: with one of them ablated, a pruned
Llama-3.1-8B falls from 66 to 25 % (arXiv 2504.18574). The form is that of lm-eval's ``mmlu_continuation``, graded by
the length-normalised likelihood (``acc_norm``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscan.analysis.verdicts.answer_sheets import CLOZE_SUFFIX
from headscan.pipelines.evaluate.harness import HarnessError

#: Settings of a task that select its questions and examples.
_QUESTIONS = """
    dataset_path dataset_name dataset_kwargs training_split validation_split test_split fewshot_split process_docs
    description num_fewshot fewshot_delimiter
""".split()

_FORM: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question.strip()}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


def cloze_tasks(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cloze form of every MMLU task that asks for letters.

    Args:
        tasks: Loaded lm-eval tasks by name.

    Returns:
        lm-eval tasks by name; that of ``mmlu_anatomy`` is ``mmlu_anatomy_continuation``, as in lm-eval.

    Raises:
        HarnessError: None of the tasks asks for the letters of MMLU.
    """
    from lm_eval.api.task import ConfigurableTask

    found = {}
    for name, task in tasks.items():
        if _asks_for_letters(name, task):
            settings = {key: getattr(task.config, key) for key in _QUESTIONS}
            # Examples are sampled as in the letter form.
            sampler = {"sampler": task.config.fewshot_config.sampler}
            config = _FORM | settings | {"task": name + CLOZE_SUFFIX, "fewshot_config": sampler}
            found[name + CLOZE_SUFFIX] = ConfigurableTask(config=config)
    if not found:
        raise HarnessError(
            f"mmlu_cloze=True needs a task with the letters of MMLU, not only {', '.join(list(tasks)[:3])}. Add mmlu or"
            " a subject of it to `tasks`, or omit `mmlu_cloze`"
        )
    return {name: task for name, task in found.items() if name not in tasks}


def _asks_for_letters(name: str, task: Any) -> bool:
    letters = task.config.doc_to_choice
    return (
        "mmlu" in name
        and task.OUTPUT_TYPE == "multiple_choice"
        and isinstance(letters, list)
        and all(len(letter) == 1 for letter in letters)
        and {"question", "choices", "answer"} <= set(next(iter(task.eval_docs), {}))
    )
