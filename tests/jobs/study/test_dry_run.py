"""A dry run of a study: steps and times, and nothing on disk."""

from __future__ import annotations

from pathlib import Path

from headscan.study.study_step import Study


def test_a_dry_run_names_the_steps_and_keeps_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    study = Study("demo", hours=0.1, max_tokens=64, out=tmp_path / "study", dry_run=True)  # type: ignore[arg-type]
    answer = study.run(say=lines.append)
    assert list(answer.steps)[::6] == ["1. scan", "7. questions"] and min(answer.steps.values()) > 0
    assert answer.savings == () and "1. scan" in str(answer) and "--dry-run" in str(answer)
    assert any(line.startswith("a forward pass reads") for line in lines)
    assert list(tmp_path.iterdir()) == []
