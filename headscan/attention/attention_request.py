"""What is asked of an attention call: which numbers, of which tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK, PROFILES, STATISTICS
from headscan.errors import InterventionError

PATHS = ("auto", "fused", "blockwise")

#: Norms of value vectors: measured at the attention hook, though they need no weights.
VALUE_STATISTICS = frozenset({"first_value_norm", "value_norm"})
WEIGHT_STATISTICS = frozenset(s.name for s in STATISTICS.values() if s.hook == "attention") - VALUE_STATISTICS
#: What only explicit weights tell.
EXPLICIT = frozenset(s.name for s in STATISTICS.values() if s.panel == "full") | PROFILES.keys()
#: What can be told of the last tokens of a sequence alone, and joined with what is known of those before.
CONTINUABLE = VALUE_STATISTICS | {"first_token_weight", "entropy"}
#: Undefined where the keys are another sequence's.
POSITIONAL = frozenset({"recent_mass", "distant_mass", "previous_token_weight", "self_weight"}) | {
    "argmax_offsets",
    "mass_by_distance",
}


@dataclass(frozen=True)
class MassWidths:
    """How many first keys are the sink, and how many last ones are recent.

    Raises:
        InterventionError: A width below 1.
    """

    sink: int = DEFAULT_SINK
    recent: int = DEFAULT_RECENT

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            if getattr(self, name) < 1:
                raise InterventionError(f"width {name}={getattr(self, name)} is too small: give at least 1")


@dataclass(frozen=True)
class AttentionRequest:
    """What one attention call is to tell of its heads.

    Attributes:
        statistics: Names of statistics and profiles that the attention hook measures.
        lengths: Real queries of each sequence (B,).
        key_lengths: Real keys (B,): ``lengths`` unless the keys are another sequence's.
        widths: Widths of sink and recent mass.
        path: ``fused``, ``blockwise``, or ``auto``: fused where it serves.
        ignored_keys: bool (B, S), keys that ``confidence`` leaves out; None: none.
        past: How many keys stand before the first query's own. The numbers are those of the queries that are there,
            and of no more than `CONTINUABLE`.

    Raises:
        InterventionError: An unknown path, or a statistic that needs the whole sequence beside a past.
    """

    statistics: frozenset[str]
    lengths: Tensor
    key_lengths: Tensor
    widths: MassWidths
    path: str = "auto"
    ignored_keys: Tensor | None = None
    past: int = 0

    def __post_init__(self) -> None:
        if self.past and (whole := sorted(self.statistics - CONTINUABLE)):
            raise InterventionError(f"{', '.join(whole)}: told of whole sequences only, not of what follows a prefix")
        if self.path not in PATHS:
            raise InterventionError(f"unknown attention path {self.path!r}: choose {', '.join(PATHS)}")

    def on(self, device: torch.device) -> AttentionRequest:
        """The same request with its tensors on a device."""
        if self.lengths.device == device:
            return self
        ignored = None if self.ignored_keys is None else self.ignored_keys.to(device)
        return replace(
            self, lengths=self.lengths.to(device), key_lengths=self.key_lengths.to(device), ignored_keys=ignored
        )

    @property
    def explicit(self) -> bool:
        """Whether the weights themselves are needed."""
        return bool(self.statistics & EXPLICIT)

    @property
    def per_query(self) -> frozenset[str]:
        """Numbers per query from which the statistics follow: some of the names, and ``weight_sum``."""
        needs: set[str] = set()
        for name in self.statistics & (WEIGHT_STATISTICS | {"argmax_offsets"}):
            needs.update(_PER_QUERY.get(name, (name,)))
        return frozenset(needs)


#: What has to be known per query for a statistic that is not itself a mean of such a number.
_PER_QUERY: dict[str, tuple[str, ...]] = {
    "relative_entropy": ("entropy",),
    "distant_mass": ("weight_sum", "sink_mass", "recent_mass"),
    "learned_sink_mass": ("weight_sum",),
    "received_max": (),
    "received_concentration": (),
}
