"""The benchmarks of `make gpu` run, small, on a CPU, and judge their goals."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch

from tests.benchmarks import bench_arms, bench_cache, bench_instrument
from tests.benchmarks.bench_cache import COLUMNS, CacheLoad, cache_rows, verdict_on_cache
from tests.benchmarks.bench_instrument import verdict_on_goal

CPU = torch.device("cpu")


def output(main: Callable[[], None], options: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    patch.setattr(sys, "argv", ["bench", *options.split()])
    main()
    return capsys.readouterr().out


def test_scans_are_timed_by_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    found = output(bench_instrument.main, "--loads 135M:1:128,135M:1:64:2 --seconds 0 --parts", monkeypatch, capsys)
    assert "| 135M | 1 | 128 | the entropy's part of the 15 scores |" in found
    assert "| 135M | 128 | identities: output and log-sum-exp |" in found and "| 135M | 1 | 128 | eager |" in found
    assert "| 135M | 1 | 2 x 64 | eager |" in found
    assert re.search(
        r"Goal of 1.08 x plain for the 15 scores: (not )?met \(135M, 128 tokens: \d.*; 135M, 2 x 64", found
    )


def test_arms_are_timed_beside_whole_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    options = "--beside whole --shapes 10M --subjects 1 --questions 1 --rounds 1"
    rows = re.findall(r"\| 10M \| (\w+) \|.*\| (\S+) \|", output(bench_arms.main, options, monkeypatch, capsys))
    assert [arm for arm, _ in rows] == ["mask", "rule"]
    assert all(float(difference) < 1e-4 for _, difference in rows)


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bench in (bench_arms, bench_cache, bench_instrument):
        with pytest.raises(SystemExit) as ended:
            output(bench.main, "--device cuda", monkeypatch, capsys)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("No CUDA device here: nothing was timed")


def test_the_goal_is_judged_by_its_worst_load() -> None:
    assert "met (8B: 1.050)" in verdict_on_goal({"8B": 1.05})
    assert "not met (8B: 1.050; 1B: 1.200)" in verdict_on_goal({"8B": 1.05, "1B": 1.2})


def test_the_goal_of_caches_is_judged_by_the_last_load() -> None:
    few, many = {"1 row": (0.5, 0.9, 1.1)}, {"1 row": (0.5, 0.9, 1.1), "8 rows": (0.51, 0.5, 0.75)}
    assert "1.0 x the time of StaticCache: not met (0.500 x" in verdict_on_cache(few, torch.device("cuda"))
    met = verdict_on_cache(many, torch.device("cuda"))
    assert "1.5 x faster steps, and at most 1.0 x the time of StaticCache: met (0.510 x the bytes, 0.500 x" in met
    assert "the time, 2.00 x faster than DynamicCache" in met
    assert "0.750 x the time of StaticCache: 8 rows" in met
    assert "of a step, and at most 1.0 x the time of StaticCache: not met" in verdict_on_cache(
        {"": (0.53, 0.7, 0.8)}, CPU
    )
    assert "StaticCache: met" in verdict_on_cache({"": (0.5, 0.7, 0.8)}, CPU)
    assert "StaticCache: not met" in verdict_on_cache({"": (0.5, 0.7, 1.1)}, CPU)
    rows = list(cache_rows(CacheLoad("1B", 1, 64, 1, 1, "float32"), CPU, ratios := {}))
    assert [row[1] for row in rows] == ["DynamicCache", "StaticCache", "PlanCache, no windows", "PlanCache"]
    assert [len(row) for row in rows] == [len(COLUMNS)] * 4 and len(next(iter(ratios.values()))) == 3
    assert verdict_on_cache({}, CPU) == "The cache was not timed."
