"""The overhead of measuring over a plain forward pass, by part.

Shapes are some layers of a Llama model with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import headscan
from headscan.attention.kernels import kernels_for
from headscan.catalog import SCORES, panel_names, statistics_for
from headscan.gpu_proof.checks import first_line
from headscan.gpu_proof.timing import medians
from headscan.models.forward_inputs import run
from headscan.testing.overhead import (
    SHAPES,
    VOCABULARY,
    eager_bytes,
    eager_statistics,
    free_bytes,
    make_model,
    peak_bytes,
)

SCAN_COLUMNS = ("shape", "layers", "tokens", "way", "ms", "x plain", "peak GiB", "x plain peak")
CALL_COLUMNS = ("shape", "tokens", "call", "ms", "x sdpa")
#: Goal for the ratio of a scan to the plain pass.
GOAL = 1.08
#: The way to which the goal applies.
SCAN = "15 scores"

_ENTROPIES = frozenset({"entropy", "relative_entropy"})
_FAST = frozenset(panel_names("fast"))
#: Collected statistics, by name in the table.
_WAYS: dict[str, frozenset[str]] = {
    SCAN: statistics_for(SCORES),
    "fast panel": _FAST,
    "15 scores without the entropy": statistics_for(SCORES) - _ENTROPIES,
    "fast panel without the entropies": _FAST - _ENTROPIES,
    "entropy alone": frozenset({"entropy"}),
    "first-token weight alone": frozenset({"first_token_weight"}),
    "sink and recent mass alone": frozenset({"sink_mass", "recent_mass", "distant_mass"}),
    "self and previous weight alone": frozenset({"self_weight", "previous_token_weight"}),
    "value norms alone": frozenset({"first_value_norm", "value_norm"}),
    "output norms alone": frozenset({"last_output_norm", "output_norm", "output_mean_norm"}),
    "projected output norm alone": frozenset({"projected_output_norm"}),
}
#: The attention call of a plain model.
_CHOICE = "sdpa, torch's choice"
_MEASURED_PEAKS = ("plain", SCAN, "fast panel", "full panel", "eager")


@dataclass(frozen=True)
class Setting:
    """A shape and a length to measure.

    Attributes:
        shape: Name of the shape in `overhead`.
        layers: Number of layers.
        tokens: Tokens of the sequence.
        seconds: Time for the rounds of the fast ways, and again for those of the slow ways.
    """

    shape: str
    layers: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens"


def settings(*, small: bool) -> tuple[Setting, ...]:
    """Return the settings to measure; ``small`` selects those for a CPU."""
    if small:
        return (Setting("135M", 1, 128, 0.0),)
    return (Setting("8B", 8, 4096, 8.0), Setting("8B", 4, 32768, 15.0), Setting("1B", 8, 4096, 5.0))


def scan_rows(setting: Setting, device: torch.device, ratios: dict[str, float]) -> Iterator[tuple[object, ...]]:
    """Measure the ways to scan.

    Args:
        ratios: Receives the ratio of `SCAN`, by name of the setting.

    Yields:
        The cells of a row, as `SCAN_COLUMNS` names them.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    lm = make_model(setting.shape, setting.tokens, str(device), dtype, setting.layers)
    ids = torch.randint(0, VOCABULARY, (1, setting.tokens), device=lm.device)
    about = (setting.shape, setting.layers, setting.tokens)

    def plain() -> None:
        run(lm.model, {"input_ids": ids})

    def collecting(statistics: frozenset[str]) -> Callable[[], object]:
        return lambda: headscan.collect(lm, ids, statistics=statistics)

    quick: dict[str, Callable[[], object]] = {"plain": plain}
    if device.type == "cuda":
        quick["plain, FlashAttention 2"] = lambda: _with_flash(plain)
    quick |= {name: collecting(statistics) for name, statistics in _WAYS.items()}
    slow: dict[str, Callable[[], object]] = {"plain": plain, "full panel": collecting(frozenset(panel_names("full")))}
    kept = eager_bytes(setting.shape, setting.tokens, dtype, setting.layers)
    if fits := kept < 0.8 * free_bytes(str(device)):
        slow["eager"] = lambda: eager_statistics(lm, ids)
    peaks: dict[str, int] = {}
    for ways, fewest in ((quick, 3), (slow, 1)):
        took = medians(ways, device, setting.seconds, fewest)
        for name, way in ways.items():
            if name == "plain" and peaks:
                continue
            if name in _MEASURED_PEAKS:
                peaks[name] = peak_bytes(lm, way)
            ratio = took[name] / took["plain"]
            cells = (*about, name, f"{1e3 * took[name]:.1f}", f"{ratio:.3f}")
            peak = (f"{peaks[name] / 2**30:.2f}", f"{peaks[name] / peaks['plain']:.2f}") if name in peaks else ()
            yield (*cells, *peak)
        if SCAN in took:
            ratios[str(setting)] = took[SCAN] / took["plain"]
            entropy = (took[SCAN] - took["15 scores without the entropy"]) / took["plain"]
            yield (*about, "the entropy's part of the 15 scores", "", f"{entropy:+.3f}")
    if not fits:
        yield (*about, "eager", "not run", f"it would keep {kept / 2**30:.0f} GiB of weights")


def _with_flash(plain: Callable[[], None]) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        plain()


def call_rows(setting: Setting, device: torch.device) -> Iterator[tuple[object, ...]]:
    """Time a layer's attention call with torch's kernels and with headscan's.

    Yields:
        The cells of a row, as `CALL_COLUMNS` names them.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, heads, kv_heads, *_ = SHAPES[setting.shape]
    width = hidden // heads
    # The memory layout of a model's projections: (B, N, H, D).
    query, key, value = (
        torch.randn(1, setting.tokens, count, width, device=device, dtype=dtype).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads)
    )
    scale, kernels = width**-0.5, kernels_for(query, width, heads // kv_heads)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def chosen(backend: SDPBackend) -> Callable[[], object]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa()

        return call

    calls: dict[str, Callable[[], object]] = {_CHOICE: sdpa}
    if device.type == "cuda":
        calls["sdpa, FlashAttention 2"] = chosen(SDPBackend.FLASH_ATTENTION)
        calls["sdpa, cuDNN"] = chosen(SDPBackend.CUDNN_ATTENTION)
    if kernels is not None:
        calls["identities: output and log-sum-exp"] = lambda: kernels.causal(query, key, value, scale)
        calls["identities: second call of the entropy"] = lambda: kernels.causal(query, key, key - key[:, :, :1], scale)
        calls["identities: band of the recent mass"] = lambda: kernels.band(query, key, key, scale, 256, 4)
    about = (setting.shape, setting.tokens)
    running: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as problem:  # a backend that does not support this call on this machine
            yield (*about, name, "not run", first_line(problem)[:80])
        else:
            running[name] = call
    took = medians(running, device, setting.seconds / 8)
    for name, seconds in took.items():
        yield (*about, name, f"{1e3 * seconds:.3f}", f"{seconds / took[_CHOICE]:.2f}")


def verdict_on_goal(ratios: dict[str, float]) -> str:
    """Return a sentence about which settings meet the goal."""
    if not ratios:
        return "The scan was not timed."
    each = "; ".join(f"{name}: {ratio:.3f}" for name, ratio in ratios.items())
    met = all(ratio <= GOAL for ratio in ratios.values())
    return f"Goal of {GOAL} x plain for the 15 scores: {'met' if met else 'not met'} ({each})."
