"""A plan as a press of kvpress, so that kvpress's pipeline and benchmarks can run it.

    press = plan_press(plan)
    with press(model):
        model.generate(**inputs)

The press simulates: it masks keys and frees no memory. `headscan.PlanCache` frees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscan.errors import HeadscanError, PlanMismatchError
from headscan.kv.kept_keys import DROPPED, KeptKeys, Plan

if TYPE_CHECKING:
    from kvpress import BasePress


class KvpressError(HeadscanError):
    """kvpress cannot be imported."""


def plan_press(plan: Plan) -> BasePress:
    """Return a press that masks the keys that a plan does not keep.

    The first pass sees all keys; each later token sees what the plan keeps. So the output equals that of
    ``headscan.PlanCache(plan, prefill="full")``. Importing kvpress wraps the attention functions of transformers for
    the whole process.

    Args:
        plan: A plan with an entry for every KV head, such as `headscan.analysis.plans.HeadPlan`.

    Raises:
        KvpressError: kvpress cannot be imported.
        PlanMismatchError: The plan drops a KV head, or an entry contradicts itself.
    """
    kept = KeptKeys.of_plan(plan)
    for layer, kv_head, window in kept.windows:
        if window == DROPPED:
            raise PlanMismatchError(
                f"the plan drops KV head {kv_head} of layer {layer}, but a press masks keys and cannot make query heads"
                " output zero. Use headscan.PlanCache, or give the head a window"
            )
    kv_heads: dict[int, int] = {}
    for head in plan.heads:
        kv_heads[head.layer] = max(kv_heads.get(head.layer, 0), head.kv_head + 1)
    try:
        from headscan.pipelines.kv.masked_keys_press import MaskedKeysPress
    except ImportError as error:
        why = " ".join(str(error).split())
        raise KvpressError(f"kvpress cannot be imported ({why}). Run pip install 'headscan[kvpress]'") from error
    return MaskedKeysPress(kept, kv_heads)
