"""The demo task: which of four passages continues this code.

Made from held-out modules of the running interpreter's standard library, the same for the same interpreter: a few lines
of context, the text that really follows, and three passages of the same module that begin at the same depth of
indentation. All four are equally long in characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

TASK_NAME = "headscan_demo"
_CONTEXT = 400
_PASSAGE = 80


def write_task(folder: Path, modules: Iterable[Path], questions: int, *, seed: int = 0) -> Path:
    """Write the questions and the task's description for lm-eval; returns the folder, for ``--include-path``.

    Args:
        modules: Source files that questions are drawn from.
        questions: How many; fewer when the modules give no more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{TASK_NAME}.jsonl"
    rows = make_questions(modules, questions, seed=seed)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    description = {
        "task": TASK_NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    # JSON is YAML, and needs no further library.
    (folder / f"{TASK_NAME}.yaml").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return folder


def make_questions(modules: Iterable[Path], questions: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Questions with ``context``, four ``choices`` and the index of the right one as ``answer``."""
    candidates = [(path.name, question) for path in modules for question in _of_module(path, seed)]
    order = np.random.default_rng(seed).permutation(len(candidates))[:questions]
    return [{"module": candidates[i][0], **candidates[i][1]} for i in sorted(order)]


def _of_module(path: Path, seed: int) -> list[dict[str, Any]]:
    """Every question that a module gives, contexts that do not overlap."""
    text = path.read_text(encoding="utf-8")
    starts = [i for i in range(len(text)) if text[i] == "\n"]  # a passage begins with the line break before its line
    fits = [i for i in starts if i + _PASSAGE <= len(text) and text[i : i + _PASSAGE].strip()]
    by_indent: dict[int, list[int]] = {}
    for start in fits:
        by_indent.setdefault(_indent(text, start), []).append(start)
    rng = np.random.default_rng([seed, *hashlib.sha256(path.name.encode()).digest()[:4]])
    found = []
    free_from = 0
    for start in fits:
        if start - _CONTEXT < free_from:
            continue
        true = text[start : start + _PASSAGE]
        others = {text[i : i + _PASSAGE] for i in by_indent[_indent(text, start)] if abs(i - start) > _CONTEXT}
        distractors = sorted(others - {true})
        if len(distractors) < 3:
            continue
        chosen = [distractors[i] for i in rng.choice(len(distractors), 3, replace=False)]
        answer = int(rng.integers(4))
        chosen.insert(answer, true)
        found.append({"context": text[start - _CONTEXT : start].lstrip(), "choices": chosen, "answer": answer})
        free_from = start + _PASSAGE
    return found


def _indent(text: str, start: int) -> int:
    line = text[start + 1 : start + 1 + _PASSAGE]
    return len(line) - len(line.lstrip(" "))
