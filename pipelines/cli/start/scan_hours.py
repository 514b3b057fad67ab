"""Hours of a scan on a placement, by arithmetic from floating-point operations per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.cluster.placement.placement_base import Placement
    from headscan.sizing.forward_flops import ForwardFlops

#: Attention calls of each layer in a scan of the fast panel: the output, and the entropy.
SCAN_CALLS = 2


@dataclass(frozen=True)
class ScanHours:
    """Hours of forward passes over a corpus, with the numbers that they follow from.

    Attributes:
        tokens: Tokens of the corpus.
        sequence: Length of the sequences in tokens.
        parameters: Parameters in matrix products of a token.
        attention: Operations of one attention call of all layers for a token.
        calls: Attention calls of each layer.
        flops_per_token: Operations of a token.
        flops: Operations per second of one device.
        replicas: Copies of the model.
        at_once: Devices of a replica that compute at the same time.
    """

    tokens: int
    sequence: int
    parameters: int
    attention: float
    calls: int
    flops_per_token: float
    flops: float
    replicas: int
    at_once: int

    @classmethod
    def of(
        cls, forward: ForwardFlops, placement: Placement, *, tokens: int, sequence: int, flops: float, evaluates: bool
    ) -> ScanHours:
        """Return the hours on a placement.

        Args:
            evaluates: The passes compute logits and measure nothing.
        """
        calls = 1 if evaluates else SCAN_CALLS
        return cls(
            tokens=tokens,
            sequence=sequence,
            parameters=forward.parameters + (forward.head if evaluates else 0),
            attention=forward.attention(sequence),
            calls=calls,
            flops_per_token=forward.per_token(sequence, calls=calls, logits=evaluates),
            flops=flops,
            replicas=placement.replicas,
            at_once=placement.devices_at_once,
        )

    @property
    def hours(self) -> float:
        """Hours of the forward passes."""
        return self.tokens * self.flops_per_token / (self.flops * self.replicas * self.at_once) / 3600

    def lines(self) -> list[str]:
        """Return the hours with their arithmetic as text."""
        twice = "" if self.calls == 1 else f"{self.calls} x "
        why = "with logits" if self.calls == 1 else "without logits; the fast panel calls attention twice"
        return [
            f"operations per token: 2 x {self.parameters / 1e6:,.1f} million parameters + {twice}"
            f"{_amount(self.attention)}FLOP of attention = {_amount(self.flops_per_token)}FLOP ({why})",
            f"hours: {self.tokens:,} tokens x {_amount(self.flops_per_token)}FLOP / ({self.replicas} replica"
            f"{'s' * (self.replicas > 1)} x {self.at_once} device{'s' * (self.at_once > 1)} at once x"
            f" {_amount(self.flops)}FLOP/s) = {self.hours:.3g}",
            f"assumed: full sequences of {self.sequence:,} tokens, stages of equal work, no time for loading weights or"
            " for the store",
        ]


def measured_flops(store: Store, run_id: str, forward: ForwardFlops) -> float:
    """Return the operations per second of one worker in a finished scan.

    Args:
        forward: Operations of the scanned model.

    Raises:
        StoreError: The scan has no measured shards.
    """
    from headscan.analysis.errors import StoreError

    [found] = store.query(
        "select sum(tokens) as tokens, sum(seconds) as seconds, sum(sequences) as sequences from shards"
        " where run_id = ? and seconds > 0",
        [run_id],
    ).to_pylist()
    if not found["tokens"]:
        raise StoreError(f"scan {run_id} has 0 timed shards (limit 1). Scan again, or give `flops`")
    tokens, seconds = int(found["tokens"]), float(found["seconds"])
    length = max(1, round(tokens / int(found["sequences"])))
    return tokens / seconds * forward.per_token(length, calls=SCAN_CALLS)


def _amount(value: float) -> str:
    """Return a number with a prefix of the SI, and a space."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.4g} {prefix}"
    return f"{value:,.4g} "
