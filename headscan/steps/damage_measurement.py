"""Measurements for a plan: the damage of a window on each KV head or layer, and the loss under window masks.

The first half of the texts and recall prompts ranks the KV heads; the second half is held out.

A *unit* is what gets a window as a whole: a KV head, or all KV heads of a layer. Its first KV head names it.

Shapes: P prompts, L layers, K KV heads of the widest layer, C candidate units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from headscan.catalog import RECALL_FAMILIES, MassWidths
from headscan.engine.prompt_losses import ALL_KEYS, PromptPool, Prompts, recall_prompts, refusal, text_prompts
from headscan.errors import SequenceError
from headscan.kv.kv_damage import candidates_of, kv_damages_by_sequence
from headscan.long_work import KnownNumbers, WorkKey, hash_of
from headscan.measure.collect import collect
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad, pass_tokens
from headscan.options import BATCH_TOKENS
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import Progress
from headscan.runs.run_context import ModelContext
from headscan.statistics.scores import score
from headscan.steps.plan import Plan
from headscan.texts.recall_tasks import fixed_by
from headscan.texts.token_requests import Request
from headscan.windows import KeptKeys, KvHead, Window

#: KV heads that get a window together, by the first of them.
Units = Mapping[KvHead, tuple[KvHead, ...]]


@dataclass(frozen=True)
class DamagePool(PromptPool):
    """A pool that also measures the damage of windows."""

    def one_by_one(self, requests: Sequence[Request], window: Window, units: Units) -> np.ndarray:
        """Return the damage (P, C) by masking one KV head or layer after another; exact, and on every pool."""
        sets = [ALL_KEYS, *(KeptKeys.of([(*head, window) for head in heads]) for heads in units.values())]
        nats, _ = self.losses(requests, sets)
        return (nats[1:] - nats[:1]).T.astype(np.float32)

    def damages(
        self, requests: Sequence[Request], window: Window, heads: Sequence[KvHead], gates: tuple[float, ...]
    ) -> np.ndarray:
        """Return the damage (P, C) of a window on each KV head alone, in nats per scored token.

        Replicas with all layers estimate it for all heads at once from derivatives; pools that run range by range of
        the layers mask the heads one by one.
        """
        if self.pool.staged:
            return self.one_by_one(requests, window, {head: (head,) for head in heads})
        shortest = min(len(request.ids) for request in requests)
        if shortest <= window.covers:  # its damage is 0, and the derivative cannot estimate it
            raise SequenceError(
                f"the shortest prompt has {shortest} tokens (at least {window.covers + 1}, one more than the window). "
                "Give longer prompts, or lower `recent`"
            )

        def rope_group(row: int) -> tuple[int, int]:
            return self.rope.group(len(requests[row].ids))

        # Prompts whose rotary frequencies differ never share an item.
        of_one_rope = [list(rows) for _, rows in groupby(sorted(range(len(requests)), key=rope_group), key=rope_group)]
        parts = [part for rows in of_one_rope for part in self._parts(requests, rows)]
        items = {f"damage of prompts {part[0]} to {part[-1]}": part for part in parts}
        work = [
            WindowItem(name, tuple(requests[row] for row in part), window, gates, tuple(heads), self.batch_tokens)
            for name, part in items.items()
        ]

        def key_of(item: WindowItem) -> WorkKey:
            return "damage of a window on KV heads", window.key, gates, list(heads), hash_of(item.requests)

        damage_PC = np.empty((len(requests), len(heads)), dtype=np.float32)
        for item, damages in self._measured(measure_damages, work, key_of, np.asarray):
            damage_PC[items[item.name]] = damages.reshape(-1, len(heads))
        return damage_PC

    def needs(self, requests: Sequence[Request], window: Window, heads: Sequence[KvHead]) -> np.ndarray:
        """Return the need (C,) of method ``distant_mass``: distant mass times normalised output norm, largest of a
        group. NaN marks KV heads with an unmeasured query head. The pool's replicas have all layers.
        """
        parts = self._parts(requests, range(len(requests)))
        work = [
            WindowItem(f"distant mass of part {at}", tuple(requests[row] for row in part), window)
            for at, part in enumerate(parts)
        ]

        def key_of(item: WindowItem) -> WorkKey:
            return "distant mass and output norm of texts", window.key, hash_of(item.requests)

        sums = {item.name: needs for item, needs in self._measured(measure_needs, work, key_of, np.stack)}
        readers = self.pool.one(_readers, None)
        # In the order of the texts, so that the sums do not depend on which item finished first.
        distant, norm = np.sum([sums[item.name] for item in work], axis=0).reshape(2, -1)
        width = 1 + max(head for heads_of_one in readers.values() for _, head in heads_of_one)
        need_LH = (distant * norm).reshape(-1, width)
        return np.array([np.max([need_LH[at] for at in readers[head]]) for head in heads])


@dataclass(frozen=True)
class WindowItem:
    """Prompts for one replica, and the window whose damage or distant mass they measure; see
    `kv_damages_by_sequence`.
    """

    name: str
    requests: tuple[Request, ...]
    window: Window
    gates: tuple[float, ...] = ()
    heads: tuple[KvHead, ...] = ()
    batch_tokens: int = BATCH_TOKENS


def measure_damages(lm: LoadedModel, item: WindowItem) -> np.ndarray:
    """Pool task: estimate the damages (P, C) of an item from derivatives."""
    ids, lengths = pad([request.ids for request in item.requests])
    damages = kv_damages_by_sequence(
        lm,
        ids,
        lengths,
        item.window.sink,
        item.window.recent,
        gates=item.gates,
        scored=[request.scored_tokens for request in item.requests],
        heads=item.heads,
        block=item.window.block,
        batch_tokens=item.batch_tokens,
    )
    at = [[layer for layer, _ in item.heads], [kv_head for _, kv_head in item.heads]]
    return damages[:, at[0], at[1]].numpy()


def measure_needs(lm: LoadedModel, item: WindowItem) -> tuple[np.ndarray, np.ndarray]:
    """Pool task: return the distant mass of all queries and the normalised output norm (L, H), summed over texts."""
    sums = np.zeros((2, lm.grid.num_layers, max(site.num_attention_heads for site in lm.grid.sites)))
    # Distant mass needs a sink of one key, so for windows without sinks the first key does not count as distant.
    widths = MassWidths(max(item.window.sink, 1), item.window.recent)
    for request in item.requests:
        ids = torch.tensor([request.ids])
        statistics = collect(lm, ids, statistics=("distant_mass", "output_norm"), widths=widths)
        sums[0] += len(request.ids) * statistics["distant_mass"][0].numpy()
        sums[1] += score(statistics, "output_norm_ln")[0].numpy()
    return sums[0], sums[1]


def _readers(lm: LoadedModel, _: None) -> dict[KvHead, list[tuple[int, int]]]:
    """Pool task: return the query heads that read each KV head, those of layers that share its cache included."""
    readers: dict[KvHead, list[tuple[int, int]]] = {}
    for site in lm.grid.sites:
        layer = site.layer if site.kv_shared_from is None else site.kv_shared_from
        for head, kv_head in enumerate(site.kv_head_of):
            readers.setdefault((layer, kv_head), []).append((site.layer, head))
    return readers


def read_prompts(config: Plan, identity: ModelIdentity) -> list[Prompts]:
    """Return the texts of a measurement, and the prompts of each family of recall tasks."""
    assert config.corpus is not None
    tokens = config.longest(identity)
    prompts = [text_prompts(config.corpus, identity, tokens, config.sequences, config.windows[-1].covers)]
    if config.recall_prompts:
        with fixed_by("Set `recall_prompts` to 0, or raise `max_tokens` if the length is too small"):
            prompts += recall_prompts(identity, tokens, config.recall_prompts, config.seed)
    return prompts


@dataclass(frozen=True)
class Measurement:
    """The candidates, the prompts that rank them, the held-out ones on which plans are measured, and notes on what
    limits both. What ``known`` has is not measured again.
    """

    context: ModelContext
    config: Plan
    units: Units
    ranking: tuple[Prompts, ...]
    held_out: tuple[Prompts, ...]
    notes: tuple[str, ...]
    known: KnownNumbers

    @classmethod
    def of(
        cls,
        config: Plan,
        context: ModelContext,
        prompts: Sequence[Prompts] | None = None,
        known: KnownNumbers | None = None,
    ) -> Measurement:
        """Return a measurement on ``prompts``; None reads those of the settings, see `read_prompts`."""
        identity, facts = context.identity, context.facts
        heads = candidates_of(facts.grid, (facts.caches or {}).get("self", ()), identity.name)
        units: Units = {head: (head,) for head in heads}
        if config.granularity == "layer":
            units = {(layer, 0): tuple(group) for layer, group in groupby(heads, key=lambda head: head[0])}
        halves = [each.halves() for each in prompts or read_prompts(config, identity)]
        ranking, held_out = tuple(half for half, _ in halves), tuple(half for _, half in halves)
        measurement = cls(context, config, units, ranking, held_out, (), known or KnownNumbers())
        return measurement._able()

    def _able(self) -> Measurement:
        """Leave out recall tasks that the model cannot do with its full cache."""
        able, notes = [0], []
        for index, prompts in enumerate(self.ranking[1:], 1):
            if (refused := refusal(prompts, self._losses(prompts, [ALL_KEYS])[1])) is None:
                able.append(index)
            else:
                notes.append(refused)
                self.context.say(refused)
        ranking, held_out = (tuple(each[index] for index in able) for each in (self.ranking, self.held_out))
        return replace(self, ranking=ranking, held_out=held_out, notes=tuple(notes))

    def kept(self, windows: Mapping[KvHead, Window]) -> KeptKeys:
        """Return the windows of all KV heads of units."""
        return KeptKeys.of([(*head, window) for unit, window in windows.items() for head in self.units[unit]])

    @property
    def one_by_one(self) -> bool:
        """True if units are masked one after another. Derivatives by gates of whole layers would be the sums of those
        by KV head, and a model has few layers.
        """
        return self.context.pool.staged or self.config.granularity == "layer"

    def damages(self, window: Window) -> dict[str, np.ndarray]:
        """Return the mean damage (C,) of a window on text, and over the recall tasks if there are any."""
        passes = 1 + len(self.units) if self.one_by_one else 1
        total = passes * sum(len(prompts.requests) for prompts in self.ranking)
        with Progress(f"damage of {window.recent} recent tokens", total, "prompt") as progress:
            pool = self._pool(progress)
            of_texts = [
                pool.one_by_one(prompts.requests, window, self.units)
                if self.one_by_one
                else pool.damages(prompts.requests, window, tuple(self.units), self.config.gates)
                for prompts in self.ranking
            ]
        text, *recall = (damages.mean(0, dtype=np.float64) for damages in of_texts)
        return {"text": text, "recall": np.mean(recall, 0)} if recall else {"text": text}

    def _pool(self, progress: Progress) -> DamagePool:
        facts, identity = self.context.facts, self.context.identity
        tokens = pass_tokens(facts.device, self.context.batch_tokens)
        return DamagePool(self.context.pool, tokens, identity.rope_lengths, self.known, progress)

    def distant_order(self, window: Window) -> list[KvHead] | None:
        """Return the units in the order of method ``distant_mass`` on the ranking texts, layers by the largest need of
        their KV heads and then by the sum; None for pools that run range by range of the layers, and for heads without
        a number of their own.
        """
        if self.context.pool.staged:
            return None
        heads = [head for unit in self.units.values() for head in unit]
        texts = self.ranking[0].requests
        with Progress("distant mass of texts", len(texts), "text") as progress:
            needs = self._pool(progress).needs(texts, window, heads)
        if not np.isfinite(needs).all():
            return None
        of_head = dict(zip(heads, needs.tolist(), strict=True))
        of_unit = {unit: [of_head[head] for head in members] for unit, members in self.units.items()}
        return sorted(self.units, key=lambda unit: (max(of_unit[unit]), sum(of_unit[unit]), unit))

    def nats(
        self, prompts: Sequence[Prompts], sets: Sequence[KeptKeys], base: KeptKeys = ALL_KEYS
    ) -> dict[str, np.ndarray]:
        """Return the loss of each prompt under each set of windows (sets, prompts) by task; see `PromptPool.losses`."""
        return {each.task: self._losses(each, sets, base)[0] for each in prompts}

    def increases(self, prompts: Sequence[Prompts], kept: KeptKeys) -> dict[str, float]:
        """Return the loss increase of windows by task, in nats per scored token."""
        nats = self.nats(prompts, [ALL_KEYS, kept])
        return {task: np.diff(of_sets.mean(1)).item() for task, of_sets in nats.items()}

    def held_out_changes(self, kept: KeptKeys) -> Iterator[tuple[str, np.ndarray, float | None]]:
        """Yield each task with the loss increases (P,) of windows on its held-out prompts, and of a recall task the
        share of the right answer tokens that are left; None if there were none.
        """
        for each in self.held_out:
            nats, greedy = self._losses(each, [ALL_KEYS, kept])
            before, after = greedy.sum(1).tolist()
            yield each.task, nats[1] - nats[0], after / before if before and each.task in RECALL_FAMILIES else None

    def _losses(
        self, prompts: Prompts, sets: Sequence[KeptKeys], base: KeptKeys = ALL_KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        with Progress(f"windows on {prompts.name}", len(sets) * len(prompts.requests), "prompt") as progress:
            return self._pool(progress).losses(prompts.requests, sets, base)
