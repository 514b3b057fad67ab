"""Memory is linear in the length, and no more than the plain forward pass takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headscan
from headscan.architectures import VOCABULARY
from headscan.catalog import Panel, panel_names
from headscan.models.token_batches import is_out_of_memory
from tests.benchmarks import measuring
from tests.benchmarks.overhead import make_model, peak_bytes, ways
from tests.small_models import make_loaded


def peaks(tokens: int, *names: str) -> list[float]:
    """Peak memory of ways over that of the plain forward pass, on a 135M shape."""
    lm = make_model("135M", tokens, "cpu", torch.float32)
    ids = torch.randint(0, 1024, (1, tokens))
    found = ways(lm, ids, eager=False)
    plain = peak_bytes(lm, found["plain"])
    return [peak_bytes(lm, found[name]) / plain for name in names]


@pytest.mark.slow
def test_the_fast_panel_uses_the_memory_of_the_plain_pass_at_8k() -> None:
    (fast,) = peaks(8192, "fast panel")
    assert fast <= 1.1


@pytest.mark.slow
def test_32k_tokens() -> None:
    (fast,) = peaks(32768, "fast panel")
    assert fast <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("panel", "family"),
    [
        *(("fast", family) for family in ("llama", "gemma2-softcap", "gpt_oss", "mistral-sliding")),
        *(("full", family) for family in ("gpt_oss", "mistral-sliding")),
        # The full panel reads all of them by blocks of queries.
        *(pytest.param("full", family, marks=pytest.mark.slow) for family in ("llama", "gemma2-softcap")),
    ],
)
def test_memory_is_linear_in_the_length(family: str, panel: Panel) -> None:
    """Windows, soft caps and learned sinks included: nowhere is there an N x N mask or weight matrix."""
    lm = make_loaded(family)
    lm.model.config.max_position_embeddings = 4096
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())

    def peak(tokens: int) -> int:
        ids = torch.randint(0, VOCABULARY, (1, tokens))
        return peak_bytes(lm, lambda: headscan.collect(lm, ids, statistics=panel_names(panel))) - weights

    assert peak(3600) < 4.5 * peak(1200)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (torch.OutOfMemoryError("whatever it says"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_is_distinguished_from_other_errors(problem: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(problem) == expected


def test_the_bench_measures_the_gpu_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def answers(name: str, answer: object) -> None:
        def ask(device: str | torch.device | None = None) -> object:
            asked.append(torch.device(device or "cuda"))
            return answer

        monkeypatch.setattr(torch.cuda, name, ask)

    answers("synchronize", None)
    answers("reset_peak_memory_stats", None)
    answers("max_memory_allocated", 7)
    answers("mem_get_info", (8, 9))
    answers("get_device_name", "a GPU")
    lm: Any = SimpleNamespace(device=torch.device("cuda", 1))
    measuring.medians({"plain": lambda: None}, lm.device, 0.0, 1)
    assert peak_bytes(lm, lambda: None) == 7
    assert measuring.free_bytes("cuda:1") == 8
    assert measuring.processor("cuda:1") == "a GPU"
    assert asked == [lm.device] * 7
