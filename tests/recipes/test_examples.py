"""Every example of pipelines/ and analysis/ runs from another folder, and prints what its first line promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

#: What each prints. `read_with_kvpress.py` has a test of its own, since it needs another environment.
EXAMPLES = {
    "pipelines/scan_and_query.py": ("The least active heads:", "of its attention on the first token"),
    "pipelines/prune_and_reload.py": ("48 heads became 38", "--- smaller"),
    "analysis/one_scanned_row.py": ("48 rows of a sequence of ", "output_norm: row "),
    "pipelines/own_ablation.py": ("12.5 % of the heads ablated: one of 8 in each of 6 layers", "random worse"),
    "analysis/one_verdict.py": ("30 questions of 15 modules: the rule ablates ", "too few questions: needs about"),
    "pipelines/own_study.py": ("5. Evaluate: ablate heads", "model smaller"),
    "pipelines/plan_and_generate.py": ("12 of 24 KV heads keep 4 first and 60 last tokens", "--- plan"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, tmp_path: Path) -> None:
    printed = output_of(name, tmp_path)
    for words in EXAMPLES[name]:
        assert words in printed


def test_a_scanned_row_equals_explicit_attention(tmp_path: Path) -> None:
    printed = output_of("analysis/one_scanned_row.py", tmp_path)
    checked = re.findall(r"^(\w+): row ([\d.]+), explicit ([\d.]+), difference (\S+)$", printed, re.MULTILINE)
    assert [name for name, *_ in checked] == ["first_token_weight", "entropy", "output_norm"]
    for _, row, explicit, difference in checked:
        assert float(row) == pytest.approx(float(explicit), rel=1e-5)
        assert float(difference) == pytest.approx(abs(float(row) - float(explicit)), abs=2e-8)

    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    least = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    scores = [float(row["output_norm_ln"]) for row in least]
    assert len(scores) == 10 and scores == sorted(scores)
    assert f"Head {least[0]['layer']}:{least[0]['head']}:" in printed
    assert float(least[0]["entropy"]) == pytest.approx(float(checked[1][1]), abs=1e-7)


def output_of(name: str, folder: Path) -> str:
    """Run an example in a folder and return what it prints."""
    command = [sys.executable, str(ROOT / name), str(folder / "out")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=offline)
    assert done.returncode == 0, done.stderr
    return done.stdout
