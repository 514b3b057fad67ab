"""Options of `headscan evaluate` that change no arm are refused, since a user expects an effect of them."""

from __future__ import annotations

import pytest

from headscan.pipelines.cli.main import read_command
from headscan.pipelines.cli.option_parser import UsageError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask-order", "inactive"], "--mask-order has no effect without --score"),
        (["--heads", "3:5", "--plan-mode", "decode"], "--plan-mode has no effect without --plan"),
        (["--controls", "19"], "--controls has no effect without --heads, --mask, --score or --plan"),
        (["--models", "a/", "--controls", "19"], "--controls has no effect"),
        (["--no-recall", "--recall-lengths", "256"], "--no-recall asks no recall questions"),
        (["--no-recall", "--recall-questions", "8"], "--no-recall asks no recall questions"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_command(["evaluate", "demo", "--tasks", "mmlu", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--share", "0.2", "--mask-order", "inactive", "--controls", "19"],
        ["--plan", "head_plan.json", "--plan-mode", "forward,decode", "--controls", "19"],
        ["--no-recall"],
    ],
)
def test_options_with_an_effect_are_taken(words: list[str]) -> None:
    assert read_command(["evaluate", "demo", "--tasks", "mmlu", *words])
