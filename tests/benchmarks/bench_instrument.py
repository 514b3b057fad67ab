"""Time and memory of measuring, relative to a plain forward pass.

    python -m tests.benchmarks.bench_instrument [--device cuda --dtype bfloat16] [--loads 8B:8:4096,1B:8:4096] [--parts]

*eager* is the way without this package. With ``--parts``, the statistics are also timed one by one, and so are the
attention calls of a layer. The benchmark needs torch, transformers and accelerate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import headscan
from headscan.attention.fused import kernels_for
from headscan.catalog import SCORES, panel_names, statistics_for
from tests.benchmarks.measuring import Table, device_of, first_line, free_bytes, medians, parser_of, show
from tests.benchmarks.overhead import SHAPES, VOCABULARY, eager_bytes, eager_statistics, make_model, peak_bytes, ways

SCAN_COLUMNS = ("shape", "layers", "tokens", "way", "ms", "x plain", "peak MiB", "x plain peak")
CALL_COLUMNS = ("shape", "tokens", "call", "ms", "x sdpa")
#: Goal on a GPU for the ratio of a scan to the plain pass, and the way to which it applies.
GOAL, SCAN = 1.08, "15 scores"

_ENTROPIES = frozenset({"entropy", "relative_entropy"})
_FAST = frozenset(panel_names("fast"))
_NO_ENTROPY = f"{SCAN} without the entropy"
#: Parts of the statistics, by name in the table.
_PARTS: dict[str, frozenset[str]] = {
    _NO_ENTROPY: statistics_for(SCORES) - _ENTROPIES,
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


@dataclass(frozen=True)
class Load:
    """A shape, its number of layers, the tokens of a sequence, and the sequences of a batch."""

    shape: str
    layers: int
    tokens: int
    sequences: int = 1

    def __str__(self) -> str:
        return f"{self.shape}, {self.size} tokens"

    @property
    def size(self) -> str:
        """The tokens of the batch, as a table shows them."""
        return f"{self.tokens}" if self.sequences == 1 else f"{self.sequences} x {self.tokens}"

    @classmethod
    def parse(cls, text: str) -> tuple[Load, ...]:
        """Read loads such as ``8B:8:4096,1B:2:512:4``."""
        parts = (part.split(":") for part in text.split(","))
        return tuple(cls(shape, *map(int, numbers)) for shape, *numbers in parts)


#: Larger ones take a CPU minutes.
LOADS = "135M:4:512,135M:4:2048,135M:4:8192,1B:2:512,1B:2:2048"


def scan_rows(
    load: Load, device: torch.device, dtype: torch.dtype, seconds: float, ratios: dict[str, float], *, parts: bool
) -> Iterator[tuple[object, ...]]:
    """Measure the ways to scan and yield the cells of `SCAN_COLUMNS`.

    Args:
        seconds: Time for the rounds of the fast ways, and again for those of the slow ways.
        ratios: Receives the ratio of `SCAN`, by name of the load.
    """
    lm = make_model(load.shape, load.tokens, str(device), dtype, load.layers)
    ids = torch.randint(0, VOCABULARY, (load.sequences, load.tokens), device=lm.device)
    about = (load.shape, load.layers, load.size)

    def collecting(statistics: frozenset[str]) -> Callable[[], object]:
        return lambda: headscan.collect(lm, ids, statistics=statistics)

    def with_flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            plain()

    quick = ways(lm, ids, eager=False)
    plain = quick["plain"]
    slow: dict[str, Callable[[], object]] = {"plain": plain, "full panel": quick.pop("full panel")}
    if parts:
        if device.type == "cuda":
            quick["plain, FlashAttention 2"] = with_flash
        quick |= {name: collecting(statistics) for name, statistics in _PARTS.items()}
    kept = load.sequences * eager_bytes(load.shape, load.tokens, dtype, load.layers)
    if fits := kept < 0.8 * free_bytes(str(device)):
        slow["eager"] = lambda: eager_statistics(lm, ids)
    peaks: dict[str, int] = {}
    for chosen, fewest in ((quick, 3), (slow, 1)):
        took = medians(chosen, device, seconds, fewest)
        for name, way in chosen.items():
            if name == "plain" and peaks:
                continue
            if name not in _PARTS:
                peaks[name] = peak_bytes(lm, way)
            ratio = took[name] / took["plain"]
            peak = (f"{peaks[name] / 2**20:.0f}", f"{peaks[name] / peaks['plain']:.2f}") if name in peaks else ()
            yield (*about, name, f"{1e3 * took[name]:.1f}", f"{ratio:.3f}", *peak)
        if SCAN in took:
            ratios[str(load)] = took[SCAN] / took["plain"]
        if _NO_ENTROPY in took:
            entropy = (took[SCAN] - took[_NO_ENTROPY]) / took["plain"]
            yield (*about, f"the entropy's part of the {SCAN}", "", f"{entropy:+.3f}")
    if not fits:
        yield (*about, "eager", "not run", f"it would keep {kept / 2**30:.0f} GiB of weights")


def call_rows(load: Load, device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[tuple[object, ...]]:
    """Time a layer's attention call with torch's kernels and with headscan's; yield the cells of `CALL_COLUMNS`."""
    hidden, heads, kv_heads, *_ = SHAPES[load.shape]
    width = hidden // heads
    # The memory layout of a model's projections: (B, N, H, D).
    query, key, value = (
        torch.randn(load.sequences, load.tokens, count, width, device=device, dtype=dtype).transpose(1, 2)
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
        calls["identities: band of the recent mass"] = lambda: kernels.band(query, key, key, scale, 256)
    about = (load.shape, load.size)
    running: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as problem:  # a backend that does not support this call on this machine
            yield (*about, name, "not run", first_line(problem))
        else:
            running[name] = call
    took = medians(running, device, seconds / 8)
    for name, duration in took.items():
        yield (*about, name, f"{1e3 * duration:.3f}", f"{duration / took[_CHOICE]:.2f}")


def verdict_on_goal(ratios: dict[str, float]) -> str:
    """Return a sentence about which loads meet the goal."""
    each = "; ".join(f"{name}: {ratio:.3f}" for name, ratio in ratios.items())
    met = all(ratio <= GOAL for ratio in ratios.values())
    return f"Goal of {GOAL} x plain for the {SCAN}: {'met' if met else 'not met'} ({each})."


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--loads", type=Load.parse, default=LOADS, help=f"shape:layers:tokens[:sequences] (default: {LOADS})"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time for one load's rounds (default: 20)")
    parser.add_argument("--parts", action="store_true", help="also time parts of the statistics, and attention calls")
    options = parser.parse_args()
    device, dtype = device_of(options), getattr(torch, options.dtype)
    ratios: dict[str, float] = {}
    with torch.no_grad():
        if options.parts:
            calls = Table("## One attention call", CALL_COLUMNS)
            for load in options.loads:
                for cells in call_rows(load, device, dtype, options.seconds):
                    calls.row(*cells)
        scans = Table("## A scan beside the plain pass", SCAN_COLUMNS)
        for load in options.loads:
            for cells in scan_rows(load, device, dtype, options.seconds, ratios, parts=options.parts):
                scans.row(*cells)
    show(f"\n{verdict_on_goal(ratios)}")


if __name__ == "__main__":
    main()
