"""The GPU proof's own logic: right numbers pass, wrong ones, exceptions and lack of time show."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headscan.attention.kernels import CpuKernels, CudaKernels, FusedKernels
from headscan.gpu_proof.__main__ import main
from headscan.gpu_proof.answer_speed import SMALL, Answering, answer_checks
from headscan.gpu_proof.arm_checks import arm_checks
from headscan.gpu_proof.cache_checks import cache_checks
from headscan.gpu_proof.cache_speed import COLUMNS, CacheLoad, cache_rows, verdict_on_cache
from headscan.gpu_proof.checks import Check, Comparer, Difference, run_check
from headscan.gpu_proof.family_checks import family_checks
from headscan.gpu_proof.kernel_checks import kernel_checks, layouts
from headscan.gpu_proof.scan_speed import verdict_on_goal
from tests.headscan.attention.emulated_flash import flash_attention_forward

CPU = torch.device("cpu")
ROW = re.compile(r"^\| (\S+) \| .* \| (right|WRONG|FAILED|not run) \|$", re.MULTILINE)


def emulated(query: Tensor, width: int, groups: int) -> FusedKernels:
    return CudaKernels(query.dtype, flash_attention_forward)


def verdicts(output: str) -> list[tuple[str, str]]:
    """Group and verdict of every row of the first table."""
    return ROW.findall(output)


def test_right_numbers_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--minutes", "30"]) == 0
    output = capsys.readouterr().out
    found = verdicts(output)
    assert {group for group, _ in found} == {"kernels", "arms", "families", "cache", "answers"}
    assert {verdict for _, verdict in found} == {"right"}
    assert "| 135M | 1 | 128 | the entropy's part of the 15 scores |" in output
    assert "| rule | shared rows |" in output
    assert "1B, 1 layers, 1 x 1024 tokens, float32 | PlanCache |" in output
    assert re.search(r"Goal of 0.52 x the bytes and 0.75 x the time of a step: (not )?met \(0.688 x the bytes", output)
    assert re.search(r"Goal of 1.08 x plain for the 15 scores: (not )?met \(135M, 128 tokens: \d", output)
    assert f"Checks: {len(found)} right." in output


def test_a_wrong_number_ends_the_proof_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "kernels", "--minutes", "30", "--fault", "0.1"]) == 1
    assert set(verdicts(capsys.readouterr().out)) == {("kernels", "WRONG")}


def test_a_fault_shows_in_the_other_groups() -> None:
    checks = [arm_checks(CPU, small=True)[0], *family_checks(CPU, families=["llama"]), *cache_checks(CPU, small=True)]
    for check in (*checks, *answer_checks(Answering(SMALL, CPU))):
        outcome = run_check(check, Comparer(fault=0.1))
        assert outcome.verdict == "WRONG" and outcome.complaints, check.name


def test_half_precision_checks_pass_on_emulated_kernels() -> None:
    for check in kernel_checks(CPU, small=True, choose=emulated):
        if check.name.startswith("bfloat16"):
            outcome = run_check(check, Comparer())
            assert outcome.verdict == "right", (check.name, outcome.complaints)


class NoWindow(CpuKernels):
    """Sees all keys."""

    def band(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, width: int, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        return self.causal(query, key, value, scale)


class FromTheStart(CpuKernels):
    """A wrong kernel that places the first query at the first key."""

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return super().causal(query, key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], scale)


class Finite(CpuKernels):
    """Lets no NaN show in the log-sum-exp."""

    def causal(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = super().causal(query, key, value, scale)
        return out, lse.nan_to_num()


@pytest.mark.parametrize(
    ("kernels", "wrong", "right"),
    [
        (NoWindow, "windows", "one query on many keys"),
        (FromTheStart, "one query on many keys", "whole sequences"),
        (Finite, "a key that is not a number", "whole sequences"),
    ],
)
def test_kernels_with_a_fault_are_found(kernels: type[CpuKernels], wrong: str, right: str) -> None:
    checks = {check.name: check for check in kernel_checks(CPU, small=True, choose=lambda *_: kernels())}
    assert run_check(checks[f"bfloat16: {wrong}"], Comparer()).verdict == "WRONG"
    assert run_check(checks[f"bfloat16: {right}"], Comparer()).verdict == "right"


def test_kernels_that_are_not_there_fail() -> None:
    checks = kernel_checks(CPU, small=True, choose=lambda *_: None)
    served, whole, *_ = (run_check(check, Comparer()) for check in checks[:2])
    assert served.verdict == "WRONG"
    assert whole.verdict == "FAILED" and "no fused kernel serves width 64" in whole.complaints[0]


def test_an_exception_is_one_row_and_keeps_earlier_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(compare: Comparer) -> Iterator[Difference]:
        yield compare.close("one", torch.ones(2), torch.ones(2), 1e-3)
        raise RuntimeError("CUDA error: misaligned address\nand more")

    outcome = run_check(Check("kernels", "broken", broken), Comparer())
    assert (outcome.verdict, outcome.compared) == ("FAILED", 1)
    assert outcome.complaints == ("RuntimeError: CUDA error: misaligned address",)
    assert run_check(Check("kernels", "empty", lambda _: iter(())), Comparer()).verdict == "FAILED"


def test_without_time_nothing_looks_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--minutes", "0"]) == 3
    output = capsys.readouterr().out
    assert {verdict for _, verdict in verdicts(output)} == {"not run"}
    assert "not run: no time left" in output and "The scan was not timed." in output


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("No CUDA device here: nothing was run")


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "kernels,memory"]) == 2
    assert "unknown group in --only: 'memory'. Choose from kernels, arms" in capsys.readouterr().err


def test_comparisons() -> None:
    compare = Comparer()
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert compare.close("equal", one, one, 0.0).error == 0.0
    assert compare.close("relative", one * 100, torch.tensor([100.0, 210.0]), 0.1).error == pytest.approx(10 / 210)
    assert compare.close("small", one * 0, one * 1e-4, 0.1).error == pytest.approx(2e-2)
    assert compare.close("mean", one, one + 1, 1.0, mean=True).error == pytest.approx(1 / 3)
    assert compare.close("NaN where the reference is", nan, nan, 0.0).error == 0.0
    for other in (compare.close("NaN", nan, one, 1.0), compare.close("shape", one[:1], one, 1.0)):
        assert other.wrong and other.severity == float("inf")
    answers = torch.tensor([True, False])
    assert not compare.same("same", answers, answers).wrong
    assert compare.same("other", ~answers, answers).error == 1.0
    assert Comparer(fault=0.1).same("shifted", answers, answers).wrong


def test_layouts_match_their_names() -> None:
    found = layouts(CPU, torch.bfloat16)
    assert found["one KV head, expanded"][1].stride(1) == 0
    assert found["one prefix, expanded"][1].stride(0) == 0
    assert found["keys as columns"][1].stride(-1) != 1
    assert found["misaligned"][0].data_ptr() % 16
    assert found["values behind an odd part"][2].data_ptr() % 16


def test_the_goal_is_judged_by_its_worst_setting() -> None:
    assert "met (8B: 1.050)" in verdict_on_goal({"8B": 1.05})
    assert "not met (8B: 1.050; 1B: 1.200)" in verdict_on_goal({"8B": 1.05, "1B": 1.2})


def test_the_goal_of_caches_is_judged_by_the_last_setting() -> None:
    few, many = {"1 row": (0.5, 0.9, 1.1)}, {"1 row": (0.5, 0.9, 1.1), "8 rows": (0.51, 0.5, 0.75)}
    assert "faster steps: not met (0.500 x" in verdict_on_cache(few, torch.device("cuda"))
    met = verdict_on_cache(many, torch.device("cuda"))
    assert "faster steps: met (0.510 x the bytes, 0.500 x the time, 2.00 x faster than DynamicCache" in met
    assert "0.750 x the time of StaticCache: 8 rows" in met
    assert "of a step: not met" in verdict_on_cache({"": (0.53, 0.7, 0.8)}, CPU)
    rows = list(cache_rows(CacheLoad("1B", 1, 64, 1, 1, "float32"), CPU, ratios := {}))
    assert [row[1] for row in rows] == ["DynamicCache", "StaticCache", "PlanCache, no windows", "PlanCache"]
    assert [len(row) for row in rows] == [len(COLUMNS)] * 4 and len(next(iter(ratios.values()))) == 3
    assert verdict_on_cache({}, CPU) == "The cache was not timed."
