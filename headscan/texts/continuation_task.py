"""A task made from any texts: which of four passages continues this one.

A question is a few lines of context, the text that follows, and three passages of the same text with the same
indentation. All four have the same number of characters. The answer is the passage whose likelihood the context raises
most (mutual information); the likelihood alone would prefer text that is common in the corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headscan.texts.drawing import content_key, draw_items

#: Name of the task on the demo model's held-out modules.
DEMO_TASK = "headscan_demo"
#: Name of the task that a study makes from the user's texts.
CONTINUATION = "continuation"
_CONTEXT = 400
_PASSAGE = 80


def write_task(
    folder: Path,
    texts: Iterable[Path],
    questions: int,
    *,
    name: str = DEMO_TASK,
    document_of: Callable[[Path], str] = lambda file: file.name,
) -> Path:
    """Write at most ``questions`` questions from UTF-8 files and their lm-eval task; return the folder, an
    ``include_path``. A hash of their contexts draws them; the same files always give the same questions. Verdicts
    count questions of one ``document_of`` their files as dependent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    rows = [{**row, "document": document_of(Path(row["module"]))} for row in make_questions(texts, questions)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    description = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    # JSON is also YAML, and needs no other library.
    (folder / f"{name}.yaml").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return folder


def make_questions(texts: Iterable[Path], questions: int) -> list[dict[str, Any]]:
    """Return questions with ``context``, four ``choices``, and the index of the right one, ``answer``."""
    candidates = [question for path in texts for question in _of_text(path)]
    return [candidates[i] for i in draw_items((question["context"] for question in candidates), questions)]


def _of_text(path: Path) -> list[dict[str, Any]]:
    """Return all questions of a text; contexts do not overlap."""
    text = path.read_text(encoding="utf-8")
    starts = _starts(text)
    by_indent: dict[int, list[int]] = {}
    for start in starts:
        by_indent.setdefault(_indent(text, start), []).append(start)
    rng = np.random.default_rng(content_key(text))
    questions = []
    free_from = 0
    for start in starts:
        if start - _CONTEXT < free_from:
            continue
        true = _passage(text, start)
        far = {_passage(text, i) for i in by_indent[_indent(text, start)] if abs(i - start) > _CONTEXT}
        others = sorted(far - {true})
        if len(others) < 3:
            continue
        choices = [others[i] for i in rng.choice(len(others), 3, replace=False)]
        answer = int(rng.integers(4))
        choices.insert(answer, true)
        context = text[start - _CONTEXT : start].lstrip()
        questions.append({"module": path.name, "context": context, "choices": choices, "answer": answer})
        free_from = start + _PASSAGE
    return questions


def _starts(text: str) -> list[int]:
    """Return the positions where a passage may begin: line breaks, or spaces if lines are long."""
    last = len(text) - _PASSAGE
    breaks = [i for i in range(last) if text[i] == "\n"]
    if len(breaks) * _CONTEXT < len(text):
        breaks = [i for i in range(last) if text[i] in "\n "]
    return [i for i in breaks if _passage(text, i).strip()]


def _passage(text: str, start: int) -> str:
    return text[start : start + _PASSAGE]


def _indent(text: str, start: int) -> int:
    line = text[start + 1 : start + 1 + _PASSAGE]
    return len(line) - len(line.lstrip(" "))
