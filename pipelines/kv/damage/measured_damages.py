"""Damage of a window on each KV head, measured on the replicas of a pool.

Shapes: P prompts, C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headscan.attention.attention_request import MassWidths
from headscan.cluster.tasks.pool import Pool
from headscan.errors import SequenceError
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import kv_damages
from headscan.measure.collect import collect
from headscan.measure.scores import score
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.pipelines.kv.damage.masked_losses import ALL_KEYS, masked_losses
from headscan.pipelines.scoring.batching import pad
from headscan.pipelines.scoring.token_requests import Request
from headscan.sizing.window_candidates import KvHead

#: Prompts of one item of work.
_PROMPTS = 16


@dataclass(frozen=True)
class DamageItem:
    """Prompts for one replica; see `kv_damages`."""

    name: str
    requests: tuple[Request, ...]
    window: Window
    gates: tuple[float, ...]
    heads: tuple[KvHead, ...]
    batch_tokens: int


def measure_damages(lm: LoadedModel, item: DamageItem) -> np.ndarray:
    """Pool task: estimate the damages (P, C) of an item from derivatives."""
    ids, lengths = pad([request.ids for request in item.requests])
    found = kv_damages(
        lm,
        ids,
        lengths,
        item.window.sink,
        item.window.recent,
        gates=item.gates,
        scored=[request.scored for request in item.requests],
        heads=item.heads,
        batch_tokens=item.batch_tokens,
    )
    at = [[layer for layer, _ in item.heads], [kv_head for _, kv_head in item.heads]]
    return found.by_sequence_BLK[:, at[0], at[1]].numpy()


def pool_damages(
    pool: Pool,
    requests: Sequence[Request],
    window: Window,
    heads: Sequence[KvHead],
    *,
    gates: tuple[float, ...],
    batch_tokens: int,
    rope: RopeLengths = UNVARYING,
    progress: Callable[[int], None] = lambda prompts: None,
) -> np.ndarray:
    """Return the damage (P, C) of a window on each KV head alone, in nats per scored token.

    Replicas with all layers estimate it for all heads at once from derivatives; pools that run range by range of the
    layers mask the heads one by one.

    Args:
        progress: Called with the number of prompts that finished; masks count each prompt once for each head, and once
            without a mask.

    Raises:
        NotFiniteError: A damage is NaN or infinite.
        SequenceError: A prompt is not longer than the window, and derivatives estimate the damage.
    """
    if pool.staged:
        return one_by_one(pool, requests, window, heads, batch_tokens=batch_tokens, rope=rope, progress=progress)
    shortest = min(len(request.ids) for request in requests)
    if shortest <= window.width:  # its damage is 0, and the derivative cannot estimate it
        raise SequenceError(
            f"the shortest prompt has {shortest} tokens (at least {window.width + 1}, one more than the window). Give "
            "longer prompts, or lower `recent`"
        )
    # Prompts whose rotary frequencies differ never share an item.
    rows = sorted(range(len(requests)), key=lambda row: (rope.group(len(requests[row].ids)), row))
    groups: list[list[int]] = []
    for row in rows:
        key = rope.group(len(requests[row].ids))
        if not groups or len(groups[-1]) == _PROMPTS or rope.group(len(requests[groups[-1][0]].ids)) != key:
            groups.append([])
        groups[-1].append(row)
    items = {f"damage of prompts {group[0]} to {group[-1]}": group for group in groups}
    work = [
        DamageItem(name, tuple(requests[row] for row in group), window, gates, tuple(heads), batch_tokens)
        for name, group in items.items()
    ]
    damage_PC = np.empty((len(requests), len(heads)), dtype=np.float32)
    for done in pool.map(measure_damages, work):
        damage_PC[items[done.item.name]] = done.value
        progress(len(items[done.item.name]))
    return damage_PC


@dataclass(frozen=True)
class NeedItem:
    """Texts for one replica; see `pool_needs`."""

    name: str
    requests: tuple[Request, ...]
    window: Window


def measure_needs(lm: LoadedModel, item: NeedItem) -> tuple[np.ndarray, np.ndarray]:
    """Pool task: return the distant mass of all queries and the normalised output norm (L, H), summed over texts."""
    sums = np.zeros((2, lm.grid.num_layers, max(site.num_attention_heads for site in lm.grid.sites)))
    widths = MassWidths(item.window.sink, item.window.recent)
    for request in item.requests:
        ids = torch.tensor([request.ids])
        found = collect(lm, ids, statistics=("distant_mass", "output_norm"), widths=widths)
        sums[0] += len(request.ids) * found["distant_mass"][0].numpy()
        sums[1] += score(found, "output_norm_ln")[0].numpy()
    return sums[0], sums[1]


def pool_needs(pool: Pool, requests: Sequence[Request], window: Window, heads: Sequence[KvHead]) -> np.ndarray:
    """Return the need (C,) of method ``distant_mass``: distant mass times normalised output norm, largest of a group.

    NaN marks KV heads with an unmeasured query head. The pool's replicas have all layers.
    """
    parts = [requests[start : start + _PROMPTS] for start in range(0, len(requests), _PROMPTS)]
    work = [NeedItem(f"distant mass of part {at}", tuple(part), window) for at, part in enumerate(parts)]
    distant_LH, norm_LH = np.sum([done.value for done in pool.map(measure_needs, work)], axis=0)
    need_LH = distant_LH * norm_LH
    readers = pool.one(_readers, None)
    return np.array([np.max([need_LH[at] for at in readers[head]]) for head in heads])


def _readers(lm: LoadedModel, _: None) -> dict[KvHead, list[tuple[int, int]]]:
    """Pool task: return the query heads that read each KV head, those of layers that share its cache included."""
    found: dict[KvHead, list[tuple[int, int]]] = {}
    for site in lm.grid.sites:
        layer = site.layer if site.kv_shared_from is None else site.kv_shared_from
        for head, kv_head in enumerate(site.kv_head_of):
            found.setdefault((layer, kv_head), []).append((site.layer, head))
    return found


def one_by_one(
    pool: Pool,
    requests: Sequence[Request],
    window: Window,
    heads: Sequence[KvHead],
    *,
    batch_tokens: int,
    rope: RopeLengths = UNVARYING,
    progress: Callable[[int], None] = lambda prompts: None,
) -> np.ndarray:
    """Return the damage (P, C) by masking one KV head after another; exact, and on every pool."""
    sets = [ALL_KEYS, *(KeptKeys.of([(layer, kv_head, window)]) for layer, kv_head in heads)]
    nats = masked_losses(pool, requests, sets, batch_tokens=batch_tokens, rope=rope, progress=progress).nats
    return (nats[1:] - nats[:1]).T.astype(np.float32)
