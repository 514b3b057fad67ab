"""Losses with real window masks: for each set of windows, a forward pass over every prompt.

They run on every pool: on whole models, sets with few windows share the layers below their first window, and on ranges
of layers, all sets pass through a range while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headscan.ablation.ablation import Ablation
from headscan.cluster.tasks.pool import Pool, Task
from headscan.errors import NotFiniteError
from headscan.kv.kept_keys import KeptKeys
from headscan.kv.kv_windows import KvWindows
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.pipelines.scoring.bundles import BundleItem, Start, bundle, possible_starts, start_of
from headscan.pipelines.scoring.likelihood import LikelihoodItem
from headscan.pipelines.scoring.reads import LikelihoodResult
from headscan.pipelines.scoring.staged_likelihood import score_in_ranges
from headscan.pipelines.scoring.token_requests import Request

#: Requests of one item of work.
_REQUESTS = 16

ALL_KEYS = KeptKeys(())


@dataclass(frozen=True)
class Losses:
    """Losses of requests under several sets of windows.

    Attributes:
        nats: Mean loss of the scored tokens (sets, requests).
        greedy: Share of scored tokens that greedy decoding would choose (sets, requests).
    """

    nats: np.ndarray
    greedy: np.ndarray


def masked_losses(
    pool: Pool,
    requests: Sequence[Request],
    sets: Sequence[KeptKeys],
    *,
    batch_tokens: int,
    rope: RopeLengths = UNVARYING,
    progress: Callable[[int], None] = lambda passes: None,
) -> Losses:
    """Return the losses of requests under each set of windows; `ALL_KEYS` is the full cache.

    Args:
        batch_tokens: Tokens of one pass, padding included.
        rope: The lengths at which the model's rotary frequencies change.
        progress: Called with the number of (set, request) pairs that finished.

    Raises:
        UnsupportedModelError: The model computes its own attention weights.
        NotFiniteError: A loss is NaN or infinite.
    """
    ablations = [KvWindows(kept, f"windows {index}") if kept.windows else None for index, kept in enumerate(sets)]
    parts = [range(start, min(start + _REQUESTS, len(requests))) for start in range(0, len(requests), _REQUESTS)]
    possible = frozenset[Start]() if pool.staged else pool.one(possible_starts, ablations)
    groups = [[index] for index in range(len(sets))] if pool.staged else bundle(ablations, possible)
    items: dict[str, tuple[list[int], range]] = {}
    work: list[Any] = []
    for group in groups:
        for part in parts:
            name = f"windows {group[0]}, prompts {part.start} to {part.stop - 1}"
            items[name] = group, part
            chosen = tuple(requests[row] for row in part)
            if len(group) > 1:
                masks = tuple(ablations[index] for index in group)
                starts = tuple(start_of(mask, possible) for mask in masks)
                work.append(BundleItem(name, chosen, masks, starts, batch_tokens, share_prefixes=False))
            else:
                work.append(_item(name, chosen, ablations[group[0]], batch_tokens, rope))
    nats, greedy = np.empty((len(sets), len(requests))), np.empty((len(sets), len(requests)))
    scored = np.array([request.scored for request in requests])
    task: Task[Any, Any] = score_in_ranges if pool.staged else _run
    for done in pool.map(task, work):
        group, part = items[done.item.name]
        rows = list(part)
        results: list[LikelihoodResult] = [done.value] if pool.staged else done.value
        for index, result in zip(group, results, strict=True):
            nats[index, rows] = -np.array([each.log_likelihood for each in result.answers]) / scored[rows]
            greedy[index, rows] = np.array([each.greedy_tokens for each in result.answers]) / scored[rows]
        progress(len(group) * len(rows))
    if wrong := int((~np.isfinite(nats)).sum()):
        raise NotFiniteError(f"NaN or infinite losses: {wrong} of {nats.size} (limit 0). Use another `dtype`")
    return Losses(nats, greedy)


def _item(
    name: str, requests: tuple[Request, ...], ablated: Ablation | None, batch_tokens: int, rope: RopeLengths
) -> LikelihoodItem:
    return LikelihoodItem(name, requests, ablated, batch_tokens, share_prefixes=False, rope=rope)


def _run(lm: LoadedModel, item: LikelihoodItem | BundleItem) -> list[LikelihoodResult]:
    """Pool task: answer the requests of an item."""
    return item.run(lm)
