"""Units of removal: query heads, groups that share a KV head, or whole layers."""

from __future__ import annotations

from typing import Literal, get_args

from headscan.grid import Head, HeadGrid

Unit = Literal["head", "group", "layer"]
UNITS: tuple[Unit, ...] = get_args(Unit)


def find_units(grid: HeadGrid, unit: Unit) -> dict[int, list[tuple[Head, ...]]]:
    """Return the heads of each unit, by layer."""
    units: dict[int, list[tuple[Head, ...]]] = {}
    for site in grid.sites:
        heads = [Head(site.layer, head) for head in range(site.num_attention_heads)]
        if unit == "head":
            units[site.layer] = [(head,) for head in heads]
        elif unit == "group":
            index = site.kv_head_of
            groups = (tuple(h for h in heads if index[h.head] == kv) for kv in range(site.num_key_value_heads))
            units[site.layer] = [group for group in groups if group]
        else:
            units[site.layer] = [tuple(heads)] if heads else []
    return units
