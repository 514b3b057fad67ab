"""Keys that the KV cache keeps of each KV head: all, a window, or none.

Shapes: K KV heads.
"""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from numbers import Integral
from typing import Protocol

from headscan.catalog import is_chunk, whole_blocks
from headscan.errors import PlanMismatchError
from headscan.grid import HeadGrid


class PlannedKvHead(Protocol):
    """One entry of a plan, such as ``headscan.plans.PlannedHead``."""

    @property
    def layer(self) -> int: ...
    @property
    def kv_head(self) -> int: ...
    @property
    def action(self) -> str: ...
    @property
    def sink(self) -> int | None: ...
    @property
    def recent(self) -> int | None: ...


class KvHeadPlan(Protocol):
    """A plan with an entry for every KV head, such as ``headscan.plans.HeadPlan``. It may have ``block`` and
    ``chunk``, the sizes of a serving engine as in `Window`; None means 1.
    """

    @property
    def heads(self) -> Iterable[PlannedKvHead]: ...


#: Widest window; positions on a device are 64-bit integers.
_MOST_TOKENS = 1 << 53


@dataclass(frozen=True, order=True)
class Window:
    """Keys that a KV head keeps: the first ``sink`` and the last ``recent``, the query's own included.

    ``DROPPED`` keeps none: the query heads that read the KV head output zero.

    A serving engine keeps whole blocks of ``block`` tokens, and its tokens may see the window of the first one of their
    ``chunk``. So the query at position ``p`` of its text sees the key at ``k <= p`` if ``k < first`` or
    ``k >= start(p)``, in prompt and answer alike:

        first = ceil(sink / block) * block
        start(p) = floor((floor(p / chunk) * chunk - recent + 1) / block) * block

    Raises:
        PlanMismatchError: A number is no whole number, negative or too large, ``recent`` is 0 and ``sink`` is not,
            ``block`` or ``chunk`` is 0, or ``chunk`` is neither 1 nor a multiple of ``block``.
    """

    sink: int
    recent: int
    block: int = 1
    chunk: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.sink, Integral) or not isinstance(self.recent, Integral):
            raise PlanMismatchError(
                f"window of a KV head: sink {self.sink!r}, recent {self.recent!r}. Pass whole numbers of keys"
            )
        if self.sink < 0 or self.recent < 0 or (self.recent == 0 and self.sink > 0):
            raise PlanMismatchError(
                f"window of a KV head: sink {self.sink}, recent {self.recent} (limit sink 0, recent 1). Widen it"
            )
        for name, size in (("block", self.block), ("chunk", self.chunk)):
            if not isinstance(size, Integral) or isinstance(size, bool) or not 1 <= size <= _MOST_TOKENS:
                raise PlanMismatchError(f"`{name}={size!r}` of a plan (limit a whole number from 1 on). Change it")
        if not is_chunk(self.chunk, self.block):
            raise PlanMismatchError(
                f"`chunk={self.chunk}` of a plan (limit 1, or a multiple of `block={self.block}`). Change it"
            )
        if self.width > _MOST_TOKENS:
            raise PlanMismatchError(
                f"window of a KV head: sink {self.sink}, recent {self.recent} (limit {_MOST_TOKENS} together, with"
                f" blocks of {self.block} and chunks of {self.chunk}). Narrow it"
            )

    @property
    def first(self) -> int:
        """Number of first keys, in whole blocks."""
        return whole_blocks(self.sink, self.block)

    @property
    def last(self) -> int:
        """Largest number of last keys that a query sees, in whole blocks."""
        return whole_blocks(self.recent - 1, self.block) + max(self.block, self.chunk) if self.recent else 0

    @property
    def width(self) -> int:
        """Largest number of keys in the window."""
        return self.first + self.last

    @property
    def covers(self) -> int:
        """Tokens of the longest text in which every query sees all keys."""
        return whole_blocks(self.first + self.block + self.recent - 1, self.chunk) if self.recent else 0

    @property
    def key(self) -> tuple[int, ...]:
        """The window as stored numbers name it; blocks and chunks of one token are left out."""
        return (self.sink, self.recent) if (self.block, self.chunk) == (1, 1) else astuple(self)


DROPPED = Window(0, 0)


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of one layer that keep the same keys; ``window`` is None if they keep all."""

    kv_heads: tuple[int, ...]
    window: Window | None


@dataclass(frozen=True)
class KeptKeys:
    """The windows (layer, KV head, window), sorted, of a model's KV heads; those without an entry keep all keys."""

    windows: tuple[tuple[int, int, Window], ...]

    def __post_init__(self) -> None:
        for entry in self.windows if isinstance(self.windows, tuple) else (self.windows,):
            if not (isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[2], Window)):
                raise PlanMismatchError(
                    f"no window of a KV head: {reprlib.repr(entry)}. Pass "
                    "`KeptKeys.of([(layer, kv_head, Window(4, 256))])`"
                )

    @classmethod
    def of(cls, windows: Iterable[tuple[int, int, Window]]) -> KeptKeys:
        """Return the windows sorted; raise PlanMismatchError if a KV head has two."""
        ordered = tuple(sorted(windows))
        for (*head, _), (*following, _) in pairwise(ordered):
            if head == following:
                raise PlanMismatchError(
                    f"windows of (layer, KV head) {tuple(head)}: 2 (limit 1). Give each KV head one"
                )
        return cls(ordered)

    @classmethod
    def of_plan(cls, plan: KvHeadPlan) -> KeptKeys:
        """Return the windows of a plan; raise PlanMismatchError if it is none, an action is unknown or a width is
        missing.
        """
        check_is_plan(plan)
        block, chunk = (1 if size is None else size for size in engine_sizes(plan))
        kept = []
        for head in plan.heads:
            if head.action == "full":
                continue
            if head.action == "drop":
                kept.append((head.layer, head.kv_head, DROPPED))
            elif head.action == "window" and head.sink is not None and head.recent:
                kept.append((head.layer, head.kv_head, Window(head.sink, head.recent, block, chunk)))
            else:
                raise PlanMismatchError(
                    f"plan entry of layer {head.layer}, KV head {head.kv_head}: {head.action}, sink {head.sink}, recent"
                    f" {head.recent}. Make the plan again"
                )
        return cls.of(kept)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with windows, ascending."""
        return tuple(sorted({layer for layer, _, _ in self.windows}))

    def differs(self, other: KeptKeys) -> int:
        """Return the first layer in which the windows are not those of another set, which must not be equal."""
        return min(layer for layer, _, _ in set(self.windows) ^ set(other.windows))

    def groups(self, layer: int, num_key_value_heads: int) -> tuple[HeadGroup, ...]:
        """Return the KV heads of a layer by what they keep, first those that keep all; raise if one does not exist."""
        of_head = {kv_head: window for at, kv_head, window in self.windows if at == layer}
        unknown = sorted(set(of_head) - set(range(num_key_value_heads)))
        if unknown:
            raise PlanMismatchError(
                f"KV head {unknown[0]} of layer {layer} has a window (limit {num_key_value_heads - 1}). Make a plan for"
                " this model"
            )
        groups: dict[Window | None, list[int]] = defaultdict(list)
        for kv_head in range(num_key_value_heads):
            groups[of_head.get(kv_head)].append(kv_head)
        ordered = sorted(groups, key=lambda window: (window is not None, window or DROPPED))
        return tuple(HeadGroup(tuple(groups[window]), window) for window in ordered)

    def check(self, grid: HeadGrid) -> None:
        """Raise if a model's KV heads cannot have these windows, except for latent caches (MLA), which `kv_damage`
        finds.
        """
        readers = {site.kv_shared_from for site in grid.sites}
        for layer in self.layers:
            site = grid.site_of(layer)
            self.groups(layer, site.num_key_value_heads)
            why = None
            if site.sliding_window is not None:
                why = f"it attends to {site.sliding_window} keys only"
            elif site.kv_shared_from is not None:
                why = f"it reads the keys of layer {site.kv_shared_from}"
            elif layer in readers:
                why = "other layers read its keys"
            elif not site.causal:
                why = "it is not causal"
            if why:
                raise PlanMismatchError(f"layer {layer} cannot have windows: {why}. Keep its full cache")

    def within(self, first: int, last: int) -> KeptKeys:
        """Return the windows of the layers ``first`` to ``last - 1``."""
        return KeptKeys(tuple(each for each in self.windows if first <= each[0] < last))


def engine_sizes(plan: object) -> tuple[int | None, int | None]:
    """Return tokens of a block and of a chunk of the engine that serves a plan; None if the plan states none."""
    return getattr(plan, "block", None), getattr(plan, "chunk", None)


#: Fields of a plan's entries that caches read.
_ENTRY = ("layer", "kv_head", "action", "sink", "recent")


def check_is_plan(plan: object) -> None:
    """Raise PlanMismatchError if an object has no entries of KV heads, such as the path of a plan or the dict of its
    file.
    """
    heads = getattr(plan, "heads", None)
    if not isinstance(heads, Iterable) or isinstance(heads, str | bytes) or isinstance(plan, Mapping):
        raise PlanMismatchError(
            f"`plan={reprlib.repr(plan)}` is a {type(plan).__name__}, no plan. Read its file with"
            " headscan.load_plan(path)"
        )
    for at, head in enumerate(heads):
        missing = [name for name in _ENTRY if not hasattr(head, name)]
        if missing:
            raise PlanMismatchError(
                f"entry {at} of the plan is a {type(head).__name__} without {', '.join(missing)}. Pass entries such as"
                " those of headscan.load_plan(path)"
            )


def checked_window(sink: int, recent: int, block: int = 1) -> Window:
    if recent < 1 or sink < 0:
        raise PlanMismatchError(f"window of `sink={sink}`, `recent={recent}` (limit sink 0, recent 1). Widen it")
    return Window(sink, recent, block)
