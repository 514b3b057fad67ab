"""Windows: which keys the KV cache keeps of a KV head, and the windows of a model.

One `Window` is what a plan file, a KV cache, an arm of an evaluation and an export hold of a KV head; None instead of a
window keeps all keys.

Shapes: K KV heads.
"""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING

from headscan.errors import PlanMismatchError

if TYPE_CHECKING:
    from headscan.grid import HeadGrid

#: (layer, KV head).
KvHead = tuple[int, int]

#: Widest window; positions on a device are 64-bit integers.
_MOST_TOKENS = 1 << 53


def whole_blocks(tokens: int, block: int | None) -> int:
    """Return tokens rounded up to whole blocks; None counts tokens."""
    return tokens if block is None else -(-tokens // block) * block


def is_chunk(chunk: int | None, block: int | None) -> bool:
    """Return True if windows can have chunks of so many tokens: 1, or whole blocks."""
    return chunk is None or chunk == 1 or chunk % (block or 1) == 0


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

    def kept(self, tokens: int) -> int:
        """Return the tokens in the cache after ``tokens`` tokens: the blocks of the first tokens, and those that the
        last token sees.
        """
        if not self.recent:
            return 0
        start = max(0, ((tokens - 1) // self.chunk * self.chunk - self.recent + 1) // self.block * self.block)
        end = whole_blocks(tokens, self.block)
        return min(end, self.first + end - start)

    def sized(self, block: int | None, chunk: int | None) -> Window:
        """Return the window in the blocks and chunks of an engine; None is 1. `DROPPED` stays as it is."""
        return (
            replace(self, block=1 if block is None else block, chunk=1 if chunk is None else chunk)
            if self.recent
            else self
        )

    @property
    def key(self) -> tuple[int, ...]:
        """The window as stored numbers name it; blocks and chunks of one token are left out."""
        return (self.sink, self.recent) if (self.block, self.chunk) == (1, 1) else astuple(self)


DROPPED = Window(0, 0)


#: KV heads of one layer that keep the same keys, and their window; None if they keep all.
HeadGroup = tuple[tuple[int, ...], Window | None]


@dataclass(frozen=True)
class KeptKeys:
    """The windows (layer, KV head, window), sorted, of a model's KV heads; those without an entry keep all keys.

    Attributes:
        kv_heads: Number of KV heads by layer, which `PlanCache` needs; 0 for a layer whose cache the plan does not
            describe, and None if they are unknown.
        block: Tokens of a block of the serving engine, by which heads that keep all keys count their bytes.
        sliding: Keys that a query sees in layers that the model itself bounds, by layer.
    """

    windows: tuple[tuple[int, int, Window], ...]
    kv_heads: Mapping[int, int] | None = field(default=None, compare=False)
    block: int = field(default=1, compare=False)
    sliding: Mapping[int, int] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        kept = sorted({window.key for _, _, window in self.windows})
        heads = "" if self.kv_heads is None else f" of {sum(self.kv_heads.values())}"
        return f"KeptKeys({len(self.windows)}{heads} KV heads keep {reprlib.repr(kept)[1:-1] or 'less'})"

    def __post_init__(self) -> None:
        for entry in self.windows if isinstance(self.windows, tuple) else (self.windows,):
            if not (isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[2], Window)):
                raise PlanMismatchError(
                    f"no window of a KV head: {reprlib.repr(entry)}. Pass "
                    "`KeptKeys.of([(layer, kv_head, Window(4, 256))])`"
                )

    @classmethod
    def of(cls, windows: Iterable[tuple[int, int, Window]], kv_heads: Mapping[int, int] | None = None) -> KeptKeys:
        """Return the windows sorted; raise PlanMismatchError if a KV head has two."""
        ordered = tuple(sorted(windows))
        for (*head, _), (*following, _) in pairwise(ordered):
            if head == following:
                raise PlanMismatchError(
                    f"windows of (layer, KV head) {tuple(head)}: 2 (limit 1). Give each KV head one"
                )
        return cls(ordered, kv_heads)

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
        return tuple((tuple(groups[window]), window) for window in ordered)

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
        return replace(self, windows=tuple(each for each in self.windows if first <= each[0] < last))


def kept_keys(plan: object) -> KeptKeys:
    """Return the windows of a plan: a `KeptKeys`, or an object that has one as ``kept``, such as a `HeadPlan`. Raise
    PlanMismatchError for others, such as the path of a plan or the dict of its file, and if the numbers of KV heads are
    unknown.
    """
    kept = plan if isinstance(plan, KeptKeys) else getattr(plan, "kept", None)
    if not isinstance(kept, KeptKeys):
        raise PlanMismatchError(
            f"`plan={reprlib.repr(plan)}` is a {type(plan).__name__}, no plan. Read its file with"
            " headscan.load_plan(path)"
        )
    counts = kept.kv_heads or {}
    for layer, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise PlanMismatchError(
                f"`kv_heads` of layer {layer} is {count!r} (limit a whole number from 0 on). Change `kv_heads`"
            )
    unknown = [layer for layer in kept.layers if not counts.get(layer)]
    if unknown or not counts:
        raise PlanMismatchError(
            f"the number of KV heads of layer {(unknown or [0])[0]} is unknown. Pass a plan, or give KeptKeys.of"
            " `kv_heads`"
        )
    return kept
