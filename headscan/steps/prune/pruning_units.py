"""Units of heads that are removed together, and budgets: how many of them go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import head_count
from headscan.errors import PruningError
from headscan.grid import Head, HeadGrid, Unit, find_units
from headscan.options import Count, Limits, check_limits
from headscan.settings.saving_settings import KvCounts
from headscan.text_tables import counted, percent

if TYPE_CHECKING:
    from headscan.pruning.head_selection import Allowed


def all_units(grid: HeadGrid, unit: Unit) -> list[tuple[Head, ...]]:
    """Return the heads of each unit, by layer: one query head, those that share a KV head, or all of a layer."""
    return [heads for of_layer in find_units(grid, unit).values() for heads in of_layer]


def allowed_groups(grid: HeadGrid, kv_counts: KvCounts) -> Allowed | None:
    """Return by layer the numbers of KV heads that may go; None if any may. A layer may always stay as it is."""
    if kv_counts == "any":
        return None
    most = {site.layer: site.num_key_value_heads for site in grid.sites}
    return {
        layer: sorted({0, *(most[layer] - each for each in numbers)})
        for layer, numbers in divisor_kv_heads(grid).items()
    }


def divisor_kv_heads(grid: HeadGrid) -> dict[int, tuple[int, ...]]:
    """Return by layer the numbers of KV heads, at most its own, among which the query heads of an engine's layer can be
    divided, and 0 except in the first layer, which engines cannot skip.
    """
    numbers = {}
    for site in grid.sites:
        group = max(site.group_sizes, default=0)
        divisors = [
            K
            for K in range(1, site.num_key_value_heads + 1)
            if grid.max_heads % K == 0 and grid.max_heads // K >= group
        ]
        numbers[site.layer] = (*((0,) if site.layer else ()), *divisors)
    return numbers


def first_units(units: Sequence[tuple[Head, ...]], order: Sequence[tuple[int, int]], count: int) -> tuple[Head, ...]:
    """Return the heads of the ``count`` units with the lowest mean rank in ``order``, least important first."""
    by_rank = sorted(units, key=mean_ranks(units, order).__getitem__)
    return tuple(sorted(head for heads in by_rank[:count] for head in heads))


def mean_ranks(units: Sequence[tuple[Head, ...]], order: Sequence[tuple[int, int]]) -> dict[tuple[Head, ...], float]:
    """Return the mean rank of each unit's heads in ``order``; that of a head that it lacks is its length."""
    rank = {(layer, head): place for place, (layer, head) in enumerate(order)}
    return {heads: sum(rank.get((layer, head), len(rank)) for layer, head in heads) / len(heads) for heads in units}


def skipped_by(grid: HeadGrid, removed: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the layers that lose all their heads."""
    gone = set(map(tuple, removed))
    return tuple(
        site.layer
        for site in grid.sites
        if site.num_attention_heads and all((site.layer, head) in gone for head in range(site.num_attention_heads))
    )


class PruneBudget(ABC):
    """The size of a pruned model, from which follows how many units go."""

    #: True if the number of units does not depend on the method that chooses them.
    same_for_all_methods: ClassVar[bool] = False
    #: True if the budget is a size of the KV cache, which single query heads do not free.
    is_of_cache: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_limits(self, PruningError)

    @property
    @abstractmethod
    def label(self) -> str:
        """The budget in words."""

    @property
    def nominal_share(self) -> float | None:
        """Share of the units before rounding, 0 to 1; None if the budget is no share."""
        return None

    @abstractmethod
    def count(self, units: int, search: BudgetSearch) -> int:
        """Return the number of units to remove, of ``units``."""


@dataclass(frozen=True)
class BudgetSearch:
    """Measurements for budgets that are no shares.

    Attributes:
        unit_bytes: Bytes of the KV cache of each unit at a length in tokens.
        cache_bytes: Bytes of the KV cache after the removal of so many units, at a length in tokens.
        loss: Divergence of the predictions from the original's on the calibration texts after the removal and repair of
            so many units, in nats per token.
    """

    unit_bytes: Callable[[int], Sequence[int]]
    cache_bytes: Callable[[int, int], int]
    loss: Callable[[int], float]
    method: str = "damage"


@dataclass(frozen=True)
class ShareBudget(PruneBudget):
    """A share of the units, above 0 and below 1, rounded to whole units."""

    share: Annotated[float, Limits(above=0, below=1)]
    same_for_all_methods = True

    @property
    def label(self) -> str:
        return percent(self.share)

    @property
    def nominal_share(self) -> float:
        return self.share

    def count(self, units: int, search: BudgetSearch) -> int:
        count = head_count(self.share, units)
        if count >= units:
            raise PruningError(f"`share={self.share:g}` removes all {units} units (limit {units - 1}). Lower `share`")
        return count


@dataclass(frozen=True)
class BytesBudget(PruneBudget):
    """Most bytes of the KV cache of one sequence at a length in tokens."""

    kv_bytes: Count
    at: Count
    is_of_cache = True

    @property
    def label(self) -> str:
        return f"{self.kv_bytes:,} bytes at {self.at:,} tokens"

    def count(self, units: int, search: BudgetSearch) -> int:
        sizes = sorted(search.unit_bytes(self.at), reverse=True)
        if sum(sizes) <= self.kv_bytes:
            raise PruningError(
                f"`kv_bytes={self.kv_bytes}` at {self.at} tokens: the KV cache has {sum(sizes)} bytes already. Lower"
                " `kv_bytes`"
            )
        if sizes[-1] > self.kv_bytes:
            raise PruningError(
                f"`kv_bytes={self.kv_bytes}` at {self.at} tokens (limit {sizes[-1]}, with one unit left). Raise"
                " `kv_bytes`"
            )
        # No fewer units can be enough; the chosen ones may be smaller than the largest.
        least = next(count for count in range(1, units) if sum(sizes[count:]) <= self.kv_bytes)
        left = 0
        for count in range(least, units):
            left = search.cache_bytes(count, self.at)
            if left <= self.kv_bytes:
                return count
        raise PruningError(
            f"method {search.method} at {self.at} tokens: {left} bytes of KV cache with one unit left (limit"
            f" {self.kv_bytes}). Raise `kv_bytes`, or choose another method"
        )


@dataclass(frozen=True)
class LossBudget(PruneBudget):
    """Largest divergence of the predictions from the original's on the calibration texts, in nats per token."""

    max_divergence: Annotated[float, Limits(above=0)]

    @property
    def label(self) -> str:
        return f"at most {self.max_divergence:g} nats"

    def count(self, units: int, search: BudgetSearch) -> int:
        """Return a number of units within the loss, of which one more exceeds it, by bisection: the largest such number
        if the loss grows with every unit.
        """
        low, high = 0, units
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if search.loss(middle) <= self.max_divergence else (low, middle)
        if not low:
            raise PruningError(
                f"`max_divergence={self.max_divergence:g}` nats per token (limit {search.loss(1):.3g}, with one unit"
                " removed)."
                " Raise `max_divergence`"
            )
        return low


def rounding_note(
    budget: PruneBudget,
    unit: Unit,
    units: Sequence[tuple[Head, ...]],
    removed: Sequence[Head],
    kv_counts: KvCounts = "any",
) -> str:
    """Return a note if a share is not met exactly; empty if it is, or if the budget is no share."""
    share = budget.nominal_share
    total = sum(map(len, units))
    if share is None or abs(share * total - len(removed)) < 0.5:
        return ""
    names: Mapping[str, str] = {"head": "heads", "group": "KV groups", "layer": "layers"}
    gone = sum(heads[0] in set(removed) for heads in units)
    return (
        f"{percent(share)} of {total} heads are {share * total:.1f} heads; removed: {gone} of {len(units)}"
        f" {names[unit]}, with {counted(len(removed), 'head')} ({percent(len(removed) / total)})"
        + (
            "; a layer's KV heads divide its query heads, so the share can be less by up to one step"
            if kv_counts == "divisors"
            else ""
        )
    )
