"""Arms of every head of a model: this head ablated, or all others of its layer."""

from __future__ import annotations

from collections.abc import Iterable

from headscan.ablation.masks import HeadMask
from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH
from headscan.grid import AttentionSite, HeadGrid
from headscan.pipelines.replacements.ablation_value import ZERO_VALUE, AblationValue
from headscan.pipelines.scoring.arms import Arm


def head_arms(grid: HeadGrid, mode: str, value: AblationValue = ZERO_VALUE) -> list[Arm]:
    """Return an arm for each head, in the order of the layers, which arms of neighbouring layers share.

    Args:
        mode: Single heads, or all other heads of a layer; layers of one head have no others.
        value: What replaces the output of ablated heads.
    """
    arms = []
    for site in grid.sites:
        every = range(site.num_attention_heads)
        for head in every:
            if mode == EACH:
                arms.append(_arm(site, head, mode, f"head {site.layer}:{head}", [head], value))
            elif len(every) > 1:
                others = [other for other in every if other != head]
                arms.append(_arm(site, head, mode, f"all but {site.layer}:{head}", others, value))
    return arms


def _arm(site: AttentionSite, head: int, mode: str, name: str, ablated: Iterable[int], value: AblationValue) -> Arm:
    mask = HeadMask(((site.layer, each) for each in ablated), value.replacement)
    place = {"site": site.site, "layer": site.layer, "head": head, "kv_head": site.kv_head_of[head]}
    details = (("mode", mode), *place.items(), *value.details)
    return Arm(f"{name}{value.suffix}", ArmKind.MASK, mask, details=details)


#: Modes of an ablate run.
MODES = (EACH, ALL_BUT_ONE)
