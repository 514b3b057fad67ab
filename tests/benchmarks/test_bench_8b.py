"""`make gpu-8b`: its steps on a tiny model, its clock, its model, and the ways to the entropy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headscan
from headscan.study.study_time import PassCosts
from tests.benchmarks.bench_8b import TINY, Row, Step, WholeRun, hours_rows, run_steps
from tests.benchmarks.entropy_ways import COLUMNS, attention_inputs, entropy_rows
from tests.benchmarks.measuring import Clock, OutOfTime, Table
from tests.benchmarks.overhead import make_model
from tests.benchmarks.whole_model import spread_of_heads, token_ids, whole_model
from tests.sources import ROOT
from tests.test_house import OTHERS, python, without

CPU = torch.device("cpu")
VARIED = ("relative_entropy", "first_token_weight")


@pytest.fixture(scope="module")
def lm() -> headscan.LoadedModel:
    return whole_model("tiny", 256, CPU, torch.float32, layers=2, vocabulary=512)


def test_all_steps_run_on_a_tiny_model_without_the_libraries_that_a_gpu_machine_lacks() -> None:
    run = "import sys\nfrom tests.benchmarks.bench_8b import main\nsys.argv = ['bench', '--tiny']\nmain()"
    found = python(without(*OTHERS, "pytest") + run)
    steps, ways, hours = (part.strip().splitlines()[2:] for part in found.split("\n## ")[1:])
    rows = {cells[0]: cells[1:] for cells in map(_cells, steps[2:]) if len(cells) == 7}
    assert "failed" not in found and "left out" not in found and "stopped" not in found
    expected = (
        "load",
        "pass as a study times it, 4 x 64, with logits",
        *(f"{way}, {size} tokens" for size in ("64", "256", "4 x 64") for way in ("plain", "15 scores", "fast panel")),
        "the heads differ",
        "probe",
        *(f"{name}, {of}" for name in ("importance", "derivatives for a plan") for of in ("texts", "recall prompts")),
        *(f"{arm}, {way}" for arm in ("mask", "rule") for way in ("whole prompts", "shared prefixes")),
        "decoding, 2 x 512, whole StaticCache",
        "decoding, 2 x 512, PlanCache with half windows",
        "ways to the entropy, 64 tokens",
        "ways to the entropy, 256 tokens",
        "moments of all layers",
        "best subsets of one layer's heads",
        "choice by damage, with its moments",
        "repair of o and down",
        "slicing",
        "saving",
        "loading what was saved",
    )
    assert tuple(rows) == expected
    assert {cells[0] for cells in rows.values()} == {"CPU"}
    assert all(float(cells[1]) > 0 for name, cells in rows.items() if name != "the heads differ")
    assert rows["loading what was saved"][-1] == "logits differ by 0e+00, relative"
    assert re.search(r"relative entropy of the heads 0\.\d+ to 0\.\d+", rows["the heads differ"][-1])
    assert rows["repair of o and down"][-1] == "without 3 heads by damage"
    for arm in ("mask", "rule"):
        difference = re.search(r"log-likelihoods differ by (\S+)", rows[f"{arm}, shared prefixes"][-1])
        assert difference and float(difference[1]) < 1e-4
    assert all(float(cells[4]) >= 1 for cells in rows.values() if cells[4])
    names = [_cells(line)[1] for line in ways[2:] if line.startswith("| 256")]
    assert names.count("two calls") == 1 and any("Triton" in name for name in names)
    assert [line.split(" | ")[0] for line in hours[2:] if line.startswith("| ")][:2] == ["| 1. scan", "| 2. probe"]
    assert "Goal of 1.08 x plain for the 15 scores" in found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def steps_shown(
    steps: list[Step], clock: Clock, capsys: pytest.CaptureFixture, device: str = "cpu"
) -> tuple[list[str], str]:
    run = WholeRun(TINY, torch.device(device), torch.float32, "card", Path())
    failed = run_steps(run, steps, clock, Table("## Steps", ("step", "card", "s", "t", "x", "peak", "note")))
    return failed, capsys.readouterr().out


def test_a_step_that_fails_or_is_stopped_is_a_row_and_the_next_one_runs(capsys: pytest.CaptureFixture) -> None:
    def fails() -> Iterator[Row]:
        yield Row("first part", 2.0, tokens=10, plain=1.0)
        raise RuntimeError("no room\nfor a second line")

    def hangs() -> Iterator[Row]:
        try:
            time.sleep(60)
        except Exception:  # as a library may do
            pytest.fail("the step went on")
        yield Row("never")

    def works() -> Iterator[Row]:
        yield Row("works", 0.5)

    steps = [Step("fails", fails, 0), Step("hangs", hangs, 0, 0.05), Step("works", works, 0)]
    failed, shown = steps_shown(steps, Clock(60), capsys)
    assert failed == ["fails"]
    assert "| first part | card | 2.000 | 5 | 2.00 |  |  |" in shown
    assert "| fails | card |  |  |  |  | failed: no room |" in shown
    assert "| hangs | card |  |  |  |  | stopped after 0 s |" in shown
    assert "| works | card | 0.500 |" in shown and "never" not in shown


def test_a_step_for_which_no_time_is_left_is_a_row(capsys: pytest.CaptureFixture) -> None:
    def runs() -> Iterator[Row]:
        yield Row("runs", 0.5)

    steps = [Step("long", runs, 30), Step("short", runs, 5)]
    failed, shown = steps_shown(steps, Clock(12.4), capsys, "cuda")
    assert failed == [] and "| long | card |  |  |  |  | left out: 12 s left |" in shown
    assert "| short" not in shown and "| runs | card | 0.500 |" in shown


def test_a_clock_ends_a_block_and_keeps_the_timer_around_it() -> None:
    with pytest.raises(OutOfTime, match="stopped after 60 s"), Clock(60).limit(100):
        with pytest.raises(OutOfTime, match="stopped after 0 s"), Clock(0.02).limit(100):
            time.sleep(60)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left <= 60
        signal.raise_signal(signal.SIGALRM)


def test_heads_of_the_model_differ_and_those_of_a_plain_one_do_not(lm: headscan.LoadedModel) -> None:
    found = headscan.collect(lm, token_ids(lm, 2, 200), statistics=VARIED)
    assert "give the first token more than half of their weight" in spread_of_heads(found)
    plain = make_model("tiny", 256, "cpu", torch.float32, 2)
    similar = headscan.collect(plain, token_ids(plain, 2, 200), statistics=VARIED)
    with pytest.raises(ValueError, match="the heads are too similar: relative entropy of the heads"):
        spread_of_heads(similar)


def test_the_first_token_keeps_its_weight_at_any_distance(lm: headscan.LoadedModel) -> None:
    """The heads that attend to it most do so at the end of the text, too; other first tokens get little."""
    ids = token_ids(lm, 1, 256)
    first = headscan.collect(lm, ids, statistics=["first_token_weight"])["first_token_weight"]
    ids[0, 0] = ids[0, 1]
    other = headscan.collect(lm, ids, statistics=["first_token_weight"])["first_token_weight"]
    assert float(first.max()) > 0.8 and float(other.max()) < 0.2
    assert float(first.min()) < 0.3


def test_ways_to_the_entropy_agree_with_the_weights(lm: headscan.LoadedModel) -> None:
    query, key, value = attention_inputs(lm, token_ids(lm, 1, 192), 1)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(torch.ones(192, 192, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    expected = torch.special.entr(weights).sum(-1)
    measured = headscan.collect(lm, token_ids(lm, 1, 192), statistics=["entropy"])["entropy"][0, 1]
    assert torch.allclose(measured.double(), expected.mean(-1)[0], atol=1e-5)
    rows = {cells[1]: dict(zip(COLUMNS, cells, strict=False)) for cells in entropy_rows(query, key, value, "CPU", 0.0)}
    error, largest = COLUMNS[-2:]
    assert float(rows["joined, the CPU's kernel, padded"][largest]) < 1e-5
    sampled = expected[..., 4::8].mean(-1) - expected.mean(-1)
    shown = float(rows["every 8th query, its error alone"][error])
    assert shown == pytest.approx(float(sampled.square().mean().sqrt()), rel=0.06)
    assert float(rows["sampled, 1/4 of the queries"][error]) > 1e-4
    assert rows["joined, the CPU's kernel"]["ms"] == "not run"


@pytest.mark.slow
def test_the_kernel_agrees_with_float64_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    settings = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.benchmarks.entropy_kernel"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("| float32 |") == 14 and ended.stdout.count("| float16 |") == 7


def test_the_hours_of_a_study_follow_from_the_measured_costs() -> None:
    own = {name: cells for name, *cells in hours_rows(30_000.0, {}, "card")}
    assert all(by_arithmetic == by_measured for _, by_arithmetic, by_measured in own.values())
    doubled = {name: 2 * cost for name, cost in vars(PassCosts()).items()}
    slower = {name: cells for name, *cells in hours_rows(30_000.0, doubled, "card")}
    changed = {name for name, (_, ours, measured) in slower.items() if ours != measured}
    assert {name.partition(".")[0] for name in changed} >= {"1", "3", "5"}
    assert not any(name.startswith(("2.", "6.", "7.")) for name in changed)
    assert [cells[1] for cells in slower.values()] == [cells[1] for cells in own.values()]
