"""KV heads that can be dropped: all query heads that read them were shown removable."""

from __future__ import annotations

from collections.abc import Collection

from headscan.analysis.plans.format.plan_records import PlanError, PlannedModel
from headscan.analysis.plans.methods.keep_scores import Place


def removable_kv_heads(model: PlannedModel, query_heads: Collection[tuple[int, int]], verdict: str) -> dict[Place, str]:
    """Return the KV heads whose query heads are all among ``query_heads``, with the verdict; for `allocate`.

    A group includes the query heads of later layers that read the same cache.

    Args:
        query_heads: (layer, query head) that a verdict found removable together.
        verdict: The verdict in words, with its interval and its run.

    Raises:
        PlanError: A query head is not the model's, or no group is removable as a whole.
    """
    known = {(layer.layer, head) for layer in model.layers for head in range(layer.num_attention_heads)}
    if odd := sorted(set(query_heads) - known):
        raise PlanError(f"{model.name} has no query head {odd[0][1]} in layer {odd[0][0]}. Use a verdict on this model")
    found: dict[Place, str] = {}
    for layer in model.layers:
        if layer.type != "full":
            continue
        served = [each for each in model.layers if layer.layer in (each.layer, each.kv_shared_from)]
        for k in range(layer.num_key_value_heads):
            readers = {
                (each.layer, head)
                for each in served
                for head in _group(each.num_attention_heads, each.num_key_value_heads, k)
            }
            if readers <= set(query_heads):
                found[layer.layer, k] = verdict
    if not found:
        raise PlanError(
            f"none of the KV heads of {model.name} loses all of its query heads to the {len(query_heads)} removable"
            " ones, so none can be dropped. Leave out `removable`"
        )
    return found


def _group(query_heads: int, kv_heads: int, kv_head: int) -> range:
    """Return the query heads that read a KV head."""
    size = query_heads // kv_heads
    return range(kv_head * size, (kv_head + 1) * size)
