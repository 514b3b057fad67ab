"""Options of `headscan evaluate` that change no arm are refused, since a user expects an effect of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headscan.cli.main import main, read_command
from headscan.cli.option_parser import UsageError
from headscan.engine.arms import mask_arm
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.evaluation_settings import ChosenArms, ReplacementConfig
from headscan.steps.evaluate import Evaluate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask-order", "inactive"], "--mask-order has no effect without --score"),
        (["--heads", "3:5", "--plan-mode", "decode"], "--plan-mode has no effect without --plan"),
        (["--rule", "--score", "importance"], "--rule needs a score of each input, which --score importance is not"),
        (["--controls", "19"], "--controls has no effect without --heads, --mask, --score or --plan"),
        (["--models", "a/", "--controls", "19"], "--controls has no effect"),
        (["--no-recall", "--recall-lengths", "256"], "--recall-lengths has no effect with --no-recall"),
        (["--no-recall", "--recall-questions", "8"], "--recall-questions has no effect with --no-recall"),
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


@pytest.mark.parametrize(
    ("words", "score"),
    [
        ([], None),
        (["--heads", "3:5"], None),
        (["--share", "0.1"], "output_norm_ln"),
        (["--rule"], "output_norm_ln"),
        (["--run", "1a2b"], "output_norm_ln"),
        (["--rule", "--score", "entropy"], "entropy"),
    ],
)
def test_options_of_a_score_name_the_score(words: list[str], score: str | None) -> None:
    assert read_command(["evaluate", "demo", "--tasks", "mmlu", *words]).step.arms.criterion == score


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.0}, r"`share=1` \(limit below 1\)"),
        ({"controls": -1}, r"`controls=-1` \(limit 0\)"),
        ({"criterion": "entropi"}, "unknown criterion 'entropi'; did you mean entropy"),
        ({"plan_modes": ("backward",)}, "`plan_modes='backward'` is unknown. Choose forward or decode"),
        ({"plan_modes": ()}, "`plan_modes` is empty"),
        ({"plan_modes": ("decode",), "heads": ((0, 1),)}, "`plan_modes` has no effect without `plans`"),
        ({"mask_order": "inactive", "mask": "mine"}, "`mask_order` has no effect without `criterion`"),
        (
            {"controls": 19, "models": ("a",)},
            "`controls` has no effect without `heads`, `mask`, `criterion` or `plans`",
        ),
        (
            {"rule": True, "criterion": "importance"},
            "`rule` needs a score of each input, which `criterion=importance` is not",
        ),
        ({"mask_order": "inactive", "criterion": "gate"}, "`mask_order` needs a score of each input"),
        ({"replacement": ReplacementConfig("mean", CorpusSpec("texts/"))}, "`kind=mean` needs ablated heads"),
    ],
)
def test_arms_have_limits_without_the_command_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadscanError, match=message):
        ChosenArms(**settings)


@pytest.mark.parametrize("arms", [ChosenArms(heads=((0, 0),)), [mask_arm([(0, 0)])]])
def test_a_corpus_needs_a_replacement(arms: Any) -> None:
    with pytest.raises(HeadscanError, match=r"^`corpus` has no effect without a replacement by texts: leave it out$"):
        Evaluate("demo", arms=arms, corpus="texts/")  # type: ignore[arg-type]


def test_the_loss_of_held_out_text_is_judged(
    spec: ModelSpec, task_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "s.duckdb")
    words = ["evaluate", spec.source, "--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    words += ["--heads", "0:1,1:0", "--store", store, "--device", "cpu", "--replicas", "1"]
    words += ["--held-out", str(corpus_folder), "--sequences", "4", "--max-tokens", "32"]
    shown = []
    for limit in ([], ["--max-loss", "1e-9"]):
        assert main([*words, *limit, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    [arm], [strict] = (each["rows"] for each in shown)
    assert shown[0]["run_id"] == shown[1]["run_id"]
    assert ("text", "loss") in {(each["task"], each["metric"]) for each in arm["measures"]}
    assert "0.05 nats" in arm["why"] and "1e-09" in strict["why"]


def test_texts_need_a_corpus() -> None:
    for words in (["--sequences", "8"], ["--max-tokens", "64"], ["--max-loss", "0.1"]):
        with pytest.raises(UsageError, match=f"{words[0]} has no effect without --held-out"):
            read_command(["evaluate", "demo", "--tasks", "mmlu", *words])
