"""Every example runs from its own folder, and says what its first line promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

EXAMPLES = {
    "scan_and_query.py": ("The least active heads:", "of its attention on the first token"),
    "prune_and_reload.py": ("48 heads became 38", "--- smaller"),
    "one_verdict.py": ("30 questions of 15 modules: the rule ablates ", "too few questions: needs about"),
    "plan_and_generate.py": ("12 of 24 KV heads keep 4 first and 60 last tokens", "--- plan"),
}


def test_every_example_is_run() -> None:
    # The example for kvpress needs an environment of its own, which test_kvpress_example.py makes.
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "read_with_kvpress.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / name), str(tmp_path / "out")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=offline)
    assert done.returncode == 0, done.stderr
    for words in EXAMPLES[name]:
        assert words in done.stdout
