"""Plans by KV head as the plugin of vLLM in ``serving/vllm`` reads them."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.plans.head_plan import HeadPlan
from headscan.plans.plan_records import PlanError


@dataclass(frozen=True)
class HeadWindows:
    """What each KV head of a model keeps.

    Attributes:
        windows: First and last tokens of each window, ascending.
        heads: Layers x KV heads: 0 keeps all tokens, i keeps ``windows[i - 1]``. A layer without attention is empty.
    """

    windows: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, ...], ...]

    @property
    def windowed(self) -> int:
        """Number of KV heads with a window."""
        return sum(kept > 0 for row in self.heads for kept in row)

    def padded(self, kv_heads: tuple[int, ...]) -> HeadWindows:
        """Return the plan of a model whose layers have further KV heads, all of them zeros, which keep the narrowest
        window.
        """
        least = 1 + min(range(len(self.windows)), key=lambda at: sum(self.windows[at]))
        rows = zip(self.heads, kv_heads, strict=True)
        return HeadWindows(self.windows, tuple((*row, *[least] * (count - len(row))) for row, count in rows))


def head_windows(plan: HeadPlan) -> HeadWindows:
    """Return the windows of a plan; raise PlanError if it has none, or drops heads."""
    if dropped := sum(head.action == "drop" for head in plan.heads):
        raise PlanError(f"the plan drops {dropped} KV heads (limit 0 in vLLM). Prune the model instead")
    windows = tuple(sorted({(head.sink or 0, head.recent) for head in plan.heads if head.recent is not None}))
    if not windows:
        raise PlanError("the plan has no windows, so there is nothing to export. Serve the model as it is")
    number = {window: 1 + at for at, window in enumerate(windows)}
    rows: list[list[int]] = [[] for _ in range(plan.model.num_layers)]
    for head in plan.heads:
        rows[head.layer].append(0 if head.recent is None else number[head.sink or 0, head.recent])
    return HeadWindows(windows, tuple(map(tuple, rows)))
