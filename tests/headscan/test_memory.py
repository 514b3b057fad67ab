"""Memory is linear in the length, and no more than the plain forward pass takes."""

from __future__ import annotations

import pytest
import torch

import headscan
from headscan.bench import make_model, peak_bytes, ways
from headscan.catalog import Panel, panel_names
from headscan.families import VOCABULARY, make_loaded


def peaks(tokens: int, *names: str) -> list[float]:
    """Peak memory of ways over that of the plain forward pass, on a 135M shape."""
    lm = make_model("135M", tokens, "cpu", torch.float32)
    ids = torch.randint(0, 1024, (1, tokens))
    found = ways(lm, ids, eager=False)
    plain = peak_bytes(lm, found["plain"])
    return [peak_bytes(lm, found[name]) / plain for name in names]


def test_the_fast_panel_takes_what_the_plain_pass_takes_at_8k() -> None:
    (fast,) = peaks(8192, "fast panel")
    assert fast <= 1.1


@pytest.mark.slow
def test_32k_tokens() -> None:
    (fast,) = peaks(32768, "fast panel")
    assert fast <= 1.1


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gpt_oss", "mistral-sliding"])
@pytest.mark.parametrize("panel", ["fast", "full"])
def test_memory_is_linear_in_the_length(family: str, panel: Panel) -> None:
    """Windows, soft caps and learned sinks included: nowhere is there an N x N mask or weight matrix."""
    lm = make_loaded(family)
    lm.model.config.max_position_embeddings = 4096
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())

    def peak(tokens: int) -> int:
        ids = torch.randint(0, VOCABULARY, (1, tokens))
        return peak_bytes(lm, lambda: headscan.collect(lm, ids, statistics=panel_names(panel))) - weights

    assert peak(3600) < 4.5 * peak(1200)
