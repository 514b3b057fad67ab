"""Decoding steps in half precision on ``--device``, against float32 arithmetic on a CPU.

On a CPU the kernels of a GPU are emulated. A GPU must use its own, never cuDNN, and must not wait for a number.

Shapes: B sequences, N queries, H query heads, K KV heads, S tokens, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headscan.architectures import VOCABULARY
from headscan.attention.cache_attention import PLAIN, CachedHeads, ScoreTerms
from headscan.attention.calls import ScoredCall
from headscan.attention.fused import CudaKernels
from headscan.kv import decode_attention
from headscan.kv.decode_attention import OneQueryKeys
from headscan.kv.kv_windows import windowed
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_cache import PlanCache
from headscan.kv.plan_layer import PlanLayer
from headscan.windows import DROPPED, HeadGroup, Window
from tests.devices import assert_near, on
from tests.instrument.attention.emulated_flash import flash_attention_forward
from tests.instrument.kv.cache_plans import FULL, Kind, in_chunks, oracle, random_plan
from tests.small_models import make_loaded

HALF = (torch.bfloat16, torch.float16)
#: Largest error of an output, in units of the dtype's epsilon, as for the fused kernels.
ROUNDED = 6
NARROW, WIDE = Window(2, 7), Window(4, 20)
#: By name: what the KV heads keep, in groups.
GROUPS = {
    "full": (((0, 1, 2, 3), None),),
    "every second": (((0, 2), None), ((1, 3), NARROW)),
    "neighbours": (((0, 1, 2), None), ((3,), WIDE)),
    "four kinds": (((2,), None), ((3,), NARROW), ((0,), WIDE), ((1,), DROPPED)),
}
FLASH, EFFICIENT = "_flash_attention_forward", "_scaled_dot_product_efficient_attention"


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_log_sumexp: bool, *, scale: float
) -> tuple[Tensor, ...]:
    """Emulate ``aten::_scaled_dot_product_efficient_attention``: no GQA, and a bias of the full shape with rows that
    begin at 16 bytes.
    """
    assert query.shape[:2] == key.shape[:2] == value.shape[:2] and not compute_log_sumexp
    scores = scale * query.float() @ key.float().mT
    if bias is not None:
        assert bias.dtype == query.dtype and bias.shape == scores.shape and bias.stride(-1) == 1
        assert all(step % 8 == 0 for step in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0
        scores = scores + bias.float()
    return ((scores.softmax(-1) @ value.float()).to(query.dtype),)


class Operators(TorchDispatchMode):
    """Names of all operators, and of the emulated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def emulated(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that counts as one operator."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = len(self.names)
            out = kernel(*args, **kwargs)
            self.names[before:] = [name]
            return out

        return run


@pytest.fixture
def operators(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Operators:
    """Records operators; on a CPU, the kernels of a GPU are emulated."""
    seen = Operators()
    if device.type == "cpu":
        flash = seen.emulated(FLASH, flash_attention_forward)

        def kernels(_: torch.device, dtype: torch.dtype, width: int, groups: int) -> CudaKernels | None:
            return CudaKernels(dtype, flash) if dtype in HALF and width % 8 == 0 else None

        monkeypatch.setattr(decode_attention, "cache_kernels", kernels)
        monkeypatch.setattr(decode_attention, "_on_gpu_in_half", lambda x: x.dtype in HALF)
        monkeypatch.setattr(decode_attention, "_efficient_kernel", seen.emulated(EFFICIENT, efficient_attention))
    return seen


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for a GPU."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Decoding:
    """A layer that gets random tokens of all rows, and the outputs that it must return."""

    def __init__(self, groups: tuple[HeadGroup, ...], device: torch.device, dtype: torch.dtype, Dv: int = 16) -> None:
        B, K, G, S, D = 2, 4, 3, 320, 16
        generator = torch.Generator().manual_seed(1)
        self.query, self.key, self.value = (
            torch.randn(B, heads, S, width, generator=generator).to(device, dtype)
            for heads, width in ((K * G, D), (K, D), (K, Dv))
        )
        self.groups, self.at = groups, 0
        self.layer = PlanLayer("layer 0", groups, "window", None, MaskReader())

    def step(self, tokens: int, mask: Tensor | None = None) -> Tensor:
        """Return the output (B, H, N, Dv) of the next tokens, computed as transformers does."""
        part = slice(self.at, self.at + tokens)
        # A model's queries and keys are transposed views.
        query, key, value = (
            x[:, :, part].transpose(1, 2).contiguous().transpose(1, 2) for x in (self.query, self.key, self.value)
        )
        keys, values = self.layer.update(key, value)
        self.at = part.stop
        causal = mask is None and tokens > 1
        if mask is None and causal and self.at > tokens:
            at = torch.arange(self.at, device=query.device)
            mask, causal = (at <= at[-tokens:, None])[None, None], False
        if tokens == 1 and mask is not None:  # as transformers packs the query heads of a KV head
            out = F.scaled_dot_product_attention(query.reshape(len(query), 4, 3, -1), keys, values, attn_mask=mask)
            return out.reshape(len(query), 12, 1, -1)
        if mask is not None and not isinstance(keys, CachedHeads):
            keys, values = (x.repeat_interleave(3, 1) for x in (keys, values))
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, enable_gqa=True)

    def expected(self, row: int = 0, first: int = 0) -> Tensor:
        """Return the output (1, H, S, Dv) of a row's tokens from ``first``, without the cache, in float32."""
        tensors = [x[row : row + 1, :, first : self.at].float().cpu() for x in (self.query, self.key, self.value)]
        return windowed(ScoredCall(*tensors, 0.25, causal=True), self.groups, MaskReader())


def check(found: Tensor, expected: Tensor, name: str) -> None:
    assert_near(found, expected, ROUNDED * torch.finfo(found.dtype).eps, name, smallest=1.0)
    assert_near(found, expected, torch.finfo(found.dtype).eps, f"mean of {name}", mean=True, smallest=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", GROUPS)
def test_single_tokens(name: str, dtype: torch.dtype, operators: Operators, device: torch.device) -> None:
    run = Decoding(GROUPS[name], device, dtype)
    outs = [run.step(30), run.step(1)]  # the first call of a kernel is checked, which waits
    kept = sum(window != DROPPED for _, window in run.groups)
    for _ in range(120):  # beyond the first block of keys
        operators.names.clear()
        with no_waits(device), operators:
            outs.append(run.step(1))
        assert operators.names.count(FLASH) == kept and not any("scaled_dot" in each for each in operators.names)
    found = torch.cat(outs, 2)
    for row in range(2):
        check(found[row : row + 1], run.expected(row), f"{name}, row {row}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in GROUPS if name != "full"])
def test_short_chunks_behind_a_past(name: str, operators: Operators, device: torch.device) -> None:
    run = Decoding(GROUPS[name], device, torch.bfloat16)
    outs = [run.step(30), run.step(5)]
    for tokens in (3, 1, 17, 1, 1, 60, 2):
        operators.names.clear()
        with operators:
            outs.append(run.step(tokens))
        assert operators.names.count(FLASH) >= 1  # the full heads; windows of several tokens need a mask
    check(torch.cat(outs, 2)[:1], run.expected(), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS)
def test_rows_with_padding(name: str, operators: Operators, device: torch.device) -> None:
    run, starts = Decoding(GROUPS[name], device, torch.bfloat16), (0, 11)

    def mask(tokens: int) -> Tensor:
        at = torch.arange(run.at + tokens, device=device)
        start = torch.tensor(starts, device=device)[:, None, None]
        seen = (at <= at[-tokens:, None]) & (at >= start)
        padding = (at == at[-tokens:, None]) & (at < start)  # padding sees itself
        return (seen | padding)[:, None]

    outs = [run.step(30, mask(30)), run.step(1, mask(1))]
    kept = sum(window != DROPPED for _, window in run.groups)
    for _ in range(50):
        seen = mask(1)
        operators.names.clear()
        with no_waits(device), operators:
            outs.append(run.step(1, seen))
        assert operators.names.count(EFFICIENT) == kept and not any("cudnn" in each for each in operators.names)
    found = torch.cat(outs, 2)
    for row, start in enumerate(starts):
        check(found[row : row + 1, :, start:], run.expected(row, start), f"{name}, row {row}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS)
def test_values_narrower_than_keys(name: str, operators: Operators, device: torch.device) -> None:
    run = Decoding(GROUPS[name], device, torch.bfloat16, Dv=8)
    outs = [run.step(30), run.step(1)]
    for _ in range(20):
        operators.names.clear()
        with operators:
            outs.append(run.step(1))
        assert EFFICIENT in operators.names and FLASH not in operators.names
    check(torch.cat(outs, 2)[:1], run.expected(), name)


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [0, 9])
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, ("window", 2, 7))])
def test_a_model_decodes_with_these_kernels(
    kinds: tuple[Kind, ...], pad: int, operators: Operators, device: torch.device
) -> None:
    lm, exact = on(device, make_loaded("qwen3", dtype=torch.bfloat16)), make_loaded("qwen3")
    plan, ids = random_plan(exact, kinds, seed=2), torch.randint(2, VOCABULARY, (2, 60))
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    more = {"attention_mask": mask.to(device), "position_ids": (mask.cumsum(-1) - 1).clamp_min(0).to(device)}
    cache = PlanCache(plan, config=lm.model.config)
    with operators:
        found = in_chunks(lm, cache, ids.to(device), (40, *[1] * 20), **more).cpu()
    layers = [layer for layer in cache.layers if isinstance(layer, PlanLayer)]
    assert operators.names.count(EFFICIENT if pad else FLASH) >= 20 * sum(len(layer.held) for layer in layers)
    assert not any("cudnn" in name for name in operators.names[-1000:])
    for row, first in enumerate((0, pad)):
        expected = oracle(exact, plan, ids[row : row + 1, first:])[0]
        rounded = oracle(lm, plan, ids[row : row + 1, first:].to(device))[0].cpu()
        # Both round; the cache may not be further from float32 than one pass with masks is.
        assert (found[row, first:] - expected).abs().mean() <= 1.2 * (rounded - expected).abs().mean() + 1e-3


def test_new_tokens_need_one_operator_per_buffer(operators: Operators, device: torch.device) -> None:
    """As few launches as a cache of transformers needs, and three for the order of the heads."""
    run = Decoding(GROUPS["every second"], device, torch.bfloat16)
    run.step(30)
    with operators:
        run.step(1)
    views = {"view", "transpose", "slice", "unsqueeze", "select", "alias", "expand", "clone", "_unsafe_view"}
    launches = [name for name in operators.names if name not in views]
    assert launches == [*["index_select"] * 5, FLASH, FLASH, "cat", "index_select"]


def test_numbers_of_one_query_keys_can_be_read(operators: Operators) -> None:
    keys, values = torch.randn(1, 2, 9, 8).bfloat16(), torch.randn(1, 2, 9, 8).bfloat16()
    key, value = OneQueryKeys.of(keys, values)
    assert type(key) is OneQueryKeys and key.shape == keys.shape
    assert type(key + 1) is Tensor and torch.equal(key.mT @ value, keys.mT @ values)
    query, mask = torch.randn(1, 4, 1, 8).bfloat16(), torch.randn(1, 1, 1, 9).bfloat16()
    for more in ({"attn_mask": mask}, {"is_causal": True}):
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **more)
        assert torch.equal(found, F.scaled_dot_product_attention(query, keys, values, enable_gqa=True, **more))
    assert OneQueryKeys.of(keys.float(), values)[0].dtype == torch.float32
    assert type(OneQueryKeys.of(keys.float(), values)[0]) is Tensor


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("terms", [PLAIN, ScoreTerms(softcap=2.0)])
def test_a_decoding_step_never_waits_for_the_device(padded: bool, terms: ScoreTerms) -> None:
    groups = (((1, 4), None), ((0, 3), Window(2, 7)), ((2,), Window(0, 0)))
    layer = PlanLayer("layer 0", groups, "window", None, MaskReader())

    # Reading a number, and copying a list or a scalar from the host.
    def waits(tokens: int) -> set[str]:
        new, query = torch.randn(2, 5, tokens, 4), torch.randn(2, 10, tokens, 4)
        total = layer.tokens + tokens
        mask = torch.ones(total, total, dtype=torch.bool).tril()[-tokens:].repeat(2, 1, 1, 1)
        mask[1, ..., :3] = False
        with Operators() as seen:
            key, _ = layer.update(new, new)
            key.source.attend(query, mask if padded else None, None, terms)
        return {"_local_scalar_dense", "nonzero", "item", "lift_fresh", "_to_copy"} & set(seen.names)

    waits(12)
    assert not waits(1) and not waits(1)
