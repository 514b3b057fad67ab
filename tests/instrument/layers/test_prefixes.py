"""Continuing from a prefix equals whole sequences, or the family is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headscan
from headscan.architectures import FAMILIES, VOCABULARY
from headscan.layers.prefix_cache import Prefix, nearly_equal, read_prefix, shares_prefixes
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from tests.devices import assert_close, on
from tests.small_models import distinct_first, make_loaded

#: Their recurrent layers read several tokens at once only as a beginning.
WHOLE = {"jamba", "bamba"}
#: Longer than the families' sliding windows, in two steps.
STEPS = (13, 5)
LENGTHS = (7, 1, 4)
#: The prefix that each continuation follows.
ROWS = (0, 1, 0)


def texts() -> tuple[Tensor, Tensor]:
    """Return prefixes (2, N) that begin alike, and three continuations (3, N), padded on the right."""
    generator = torch.Generator().manual_seed(2)
    prefixes = torch.randint(5, VOCABULARY, (2, sum(STEPS)), generator=generator)
    prefixes[1, : STEPS[0]] = prefixes[0, : STEPS[0]]
    return prefixes, torch.randint(5, VOCABULARY, (3, max(LENGTHS)), generator=generator)


def read_in_steps(lm: LoadedModel, prefixes: Tensor) -> Prefix:
    ids = prefixes.tolist()
    read = read_prefix(lm, [each[STEPS[0] :] for each in ids], read_prefix(lm, [ids[0][: STEPS[0]]]))
    assert read.tokens == sum(STEPS)
    return read


def continued(lm: LoadedModel, read: Prefix, rest: Tensor) -> Tensor:
    cache = read.continued(ROWS[: len(rest)])
    return run_forward(lm.model, {"input_ids": rest, "past_key_values": cache, "use_cache": True})[0]


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
@torch.no_grad()
def test_a_prefix_is_continued_as_the_whole_is_read(family: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family))
    assert shares_prefixes(lm) == (family not in WHOLE)
    if family in WHOLE:
        return
    prefixes, rest = (ids.to(device) for ids in texts())
    with headscan.intervene(lm, headscan.HeadMask([(site.layer, 1) for site in lm.grid.sites[1:]])):
        read = read_in_steps(lm, prefixes)
        first = continued(lm, read, rest)
        again = continued(lm, read, rest[:1])
        for row, length in enumerate(LENGTHS):
            ids = torch.cat([prefixes[ROWS[row]][None], rest[row : row + 1, :length]], 1)
            whole = run_forward(lm.model, {"input_ids": ids})[0][0, prefixes.shape[1] :]
            assert_close(first[row, :length], whole, rtol=1e-4, atol=1e-5)
            if row == 0:  # a prefix is not used up
                assert_close(again[0, :length], whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prefix_made_of_two_is_each_of_them_in_its_layers() -> None:
    lm = make_loaded("llama")
    prefixes, rest = texts()
    plain = read_in_steps(lm, prefixes)
    with headscan.intervene(lm, headscan.HeadMask([(1, 0)])):
        masked = read_in_steps(lm, prefixes)
        expected = continued(lm, masked, rest)
        assert torch.equal(continued(lm, masked.above(2, plain), rest), expected)
        assert not torch.equal(continued(lm, plain, rest), expected)


@torch.no_grad()
def test_a_continuation_keeps_nothing_but_the_prefixes() -> None:
    lm = make_loaded("llama")
    prefixes, rest = texts()
    read = read_in_steps(lm, prefixes)
    cache = read.continued(ROWS)
    run_forward(lm.model, {"input_ids": rest, "past_key_values": cache, "use_cache": True})
    kept, own = cache.layers, read.continued(ROWS).layers
    for layer, prefix in zip(kept, own, strict=True):
        assert layer.keys is prefix.keys  # not a copy for each sequence
        assert layer.keys.shape[0] == len(prefixes)
        assert layer.keys.shape[-2] == prefixes.shape[1]


def test_running_out_of_memory_is_not_a_missing_cache() -> None:
    lm = make_loaded("llama")

    def run_out(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    lm.model.base_model.register_forward_pre_hook(run_out, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        shares_prefixes(lm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_hidden_states_with_large_norms_are_compared(dtype: torch.dtype) -> None:
    whole = torch.full((1, 64, 1024), 300.0, dtype=dtype)  # together above 65,504, the largest float16
    assert nearly_equal(whole, whole)
    assert not nearly_equal(-whole, whole)
