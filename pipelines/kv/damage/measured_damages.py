"""Damage of a window on each KV head, measured on the replicas of a pool.

Shapes: P prompts, C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headscan.cluster.tasks.pool import Pool
from headscan.errors import SequenceError
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import kv_damages
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
