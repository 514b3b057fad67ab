"""The looks of a study: more hours ask more questions of the same shares, and everything resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headscan.report.write_report import write_report
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.store import Store
from headscan.study import run_study
from headscan.study.study_answer import StudyAnswer
from headscan.study.study_step import Study
from headscan.study.study_time import looks_of
from headscan.verdicts.judge import judge
from tests.jobs.study.test_study import run, tiny

_ANSWERS = (
    "SELECT name, task, question, correct, log_likelihoods FROM answers JOIN arms USING (arm_id) JOIN runs USING"
    " (run_id) WHERE look IS NOT NULL ORDER BY ALL"
)


def asked(out: Path, **changes: Any) -> Study:
    """Return a study of one share, whose first hours ask 120 questions and whose later ones up to 240."""
    settings = {"criteria": ("output_norm_ln",), "shares": (0.02,), "window_shares": (), "prune_shares": ()}
    settings |= {"questions": 120, "max_questions": 240, "recall_questions": 0, "max_loss": 100.0}
    return tiny(out, **settings | changes)


def answers(config: Study) -> pa.Table:
    return Store(Path(config.out) / "study.duckdb").query(_ANSWERS)


def questions(answer: StudyAnswer) -> list[int]:
    """Return the number of questions of each judged share."""
    return [each.questions for saving in answer.savings for each in saving.judged]


def test_more_hours_ask_more_questions_of_the_same_share(tmp_path: Path) -> None:
    """The answers are those of a study that had the hours at once, and no look is asked twice."""
    # So few questions show no loss to be within this limit, and the estimate does not exclude it.
    whole = asked(tmp_path / "whole", max_points=3.0)
    expected = run(whole, [])
    assert questions(expected) == [240] and expected.more_questions == 0
    parted, lines = replace(whole, out=tmp_path / "parted", hours=1e-5), list[str]()
    first = run(parted, lines)
    assert questions(first) == [120] and first.more_questions == 240
    assert any("hours are used up" in line for line in lines)
    assert "with more --hours goes on, and asks up to 240 questions" in str(first)
    lines.clear()
    second = run(replace(parted, hours=1), lines)
    assert questions(second) == [240] and second.more_questions == 0
    assert answers(parted).equals(answers(whole))
    assert second.savings[0].judged[0].accuracy == expected.savings[0].judged[0].accuracy
    # The earlier looks, the scan and the losses are not measured again.
    assert not any("requests in" in line for line in lines)
    again = run(replace(parted, hours=1), [])
    assert again.savings == second.savings


def test_a_look_that_would_end_after_the_hours_is_not_begun(tmp_path: Path) -> None:
    config, lines = asked(tmp_path / "long", max_points=3.0, hours=1.0), list[str]()
    run(replace(config, hours=1e-5), lines)
    record = tmp_path / "long" / "time.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"question_seconds": [1000.0, 0.0]}))
    lines.clear()
    answer = run(config, lines)
    assert questions(answer) == [120] and answer.more_questions == 240
    assert any("further questions take about" in line and "with more hours continues" in line for line in lines)


def test_a_share_that_is_safe_is_asked_no_more(tmp_path: Path) -> None:
    """With a limit of 40 points the first looks are enough."""
    config = asked(tmp_path, max_points=40.0, max_recall_questions=0)
    assert [look.questions for look in looks_of(config)] == [30, 60, 90, 120, 240]
    answer = run(config, [])
    assert answer.savings[0].safe is not None and questions(answer) < [90]
    assert answer.questions == questions(answer)[0] and answer.more_questions == 0


@pytest.mark.parametrize(("stopped", "shares", "points"), [(2, (0.02,), 3.0), (4, (0.02, 0.04), 30.0)])
def test_a_stop_between_looks_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int, shares: tuple[float, ...], points: float
) -> None:
    """Within the looks of the first share, and within those of the second one."""
    whole = asked(tmp_path / "whole", shares=shares, max_points=points)
    expected = run(whole, [])
    assert len(expected.savings[0].judged) == len(shares)
    parted = replace(whole, out=tmp_path / "parted")
    calls = 0

    def stopping(*args: Any, **options: Any) -> str:
        nonlocal calls
        calls += options.get("purpose") is not None
        if calls == stopped:
            raise KeyboardInterrupt
        return run_evaluation(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run_study, "run_evaluation", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(parted, [])
    assert run(parted, []).savings[0].judged == expected.savings[0].judged
    assert answers(parted).equals(answers(whole))


def test_every_reader_of_a_study_has_its_verdict(tmp_path: Path) -> None:
    """The store holds what is judged together: limits, kinds, looks, and the run that measured the loss."""
    config = asked(tmp_path, max_loss=0.2, window_shares=(0.5,), max_points=7.0, recall_questions=8)
    answer = run(config, [])
    store = Store(tmp_path / "study.duckdb")
    run_id = store.query("SELECT run_id FROM arms WHERE look IS NOT NULL LIMIT 1")[0][0].as_py()
    verdict = judge(store, run_id)
    assert (verdict.max_loss, len(verdict.looks)) == (0.2, 6)
    page = write_report(store, tmp_path / "again.html", scan_run=None, evaluate_run=run_id).read_text("utf-8")
    assert all(escape(sentence) in page for sentence in verdict.sentences())
    for share in [each for saving in answer.savings for each in saving.judged if each.questions]:
        arm = verdict.by_name[share.name]
        assert (arm.label, arm.why, arm.accuracy, arm.max_points) == (share.label, share.why, share.accuracy, 7.0)
        assert arm.value("loss") == answer.losses[share.name].interval
