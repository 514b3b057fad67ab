"""lm-eval's own tasks are listed only where a task may be one of them."""

from __future__ import annotations

import json
from pathlib import Path

import lm_eval.tasks
import pytest

from headscan.settings.evaluation_settings import TaskConfig
from headscan.texts.tasks import Tasks


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

    class Counted(own):  # type: ignore[misc, valid-type]
        def __init__(self, include_path: str, include_defaults: bool = True) -> None:
            made.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=False)  # their index takes seven seconds

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Counted)
    tasks = Tasks(TaskConfig((name,), include_path=str(tmp_path)))
    assert tasks.groups == ({"mine": ["counting"]} if all_of_them else {})
    assert made == [False, True][: 1 + all_of_them]
