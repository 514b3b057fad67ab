"""Plans with random windows for small models, and the oracle of `PlanCache`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import headscan
from headscan.architectures import VOCABULARY
from headscan.kv.kv_windows import KvWindows
from headscan.kv.plan_cache import PlanCache
from headscan.models.loaded_model import LoadedModel
from headscan.windows import KeptKeys, Window


@dataclass(frozen=True)
class PlainHead:
    """An entry of a plan: a KV head that keeps all keys (``full``), a ``window`` or nothing (``drop``)."""

    layer: int
    kv_head: int
    action: str
    sink: int | None = None
    recent: int | None = None

    def kept_tokens(self, tokens: int, block: int | None = None, chunk: int | None = None) -> int:
        """Return how many of ``tokens`` tokens the head keeps, without blocks."""
        assert block is chunk is None
        if self.action == "full":
            return tokens
        return min(tokens, (self.sink or 0) + (self.recent or 0))


@dataclass(frozen=True)
class PlainPlan:
    """A plan for `PlanCache`."""

    heads: tuple[PlainHead, ...]
    block: int | None = None
    chunk: int | None = None

    @property
    def kept(self) -> KeptKeys:
        windows = [
            (head.layer, head.kv_head, Window(head.sink or 0, head.recent or 0).sized(self.block, self.chunk))
            for head in self.heads
            if head.action != "full"
        ]
        counts = Counter(head.layer for head in self.heads)
        return replace(KeptKeys.of(windows, counts), block=self.block or 1)

    def bytes(self, rows: int, tokens: int, token_bytes: int) -> int:
        """Return the bytes of a cache; ``token_bytes`` are those of one token's key and value in one head."""
        return rows * token_bytes * sum(head.kept_tokens(tokens) for head in self.heads)


#: By name: action, sink, recent.
FULL, DROP = ("full", None, None), ("drop", None, None)
NARROW, WIDE = ("window", 2, 7), ("window", 4, 20)
MIXED = (FULL, NARROW, WIDE, DROP)
Kind = tuple[str, int | None, int | None]


def plan_of(rows: Sequence[Sequence[Kind]]) -> PlainPlan:
    """Return the plan of these kinds, by layer and KV head."""
    return PlainPlan(tuple(PlainHead(at, k, *kind) for at, row in enumerate(rows) for k, kind in enumerate(row)))


def random_plan(lm: LoadedModel, kinds: Sequence[Kind] = MIXED, seed: int = 0) -> PlainPlan:
    """Return a plan with random kinds where the model can have windows, and full caches elsewhere."""
    choose = random.Random(seed).choice
    text = lm.model.config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or []
    readers = {site.kv_shared_from for site in lm.grid.sites}
    heads = []
    for site in lm.grid.sites:
        bounded = site.layer < len(types) and ("sliding" in types[site.layer] or "chunked" in types[site.layer])
        fixed = bounded or site.sliding_window is not None or site.kv_shared_from is not None or site.layer in readers
        for kv_head in range(site.num_key_value_heads):
            heads.append(PlainHead(site.layer, kv_head, *(FULL if fixed else choose(kinds))))
    return PlainPlan(tuple(heads))


def some_ids(rows: int, tokens: int) -> Tensor:
    """Return random token ids (rows, tokens), the same for each number of tokens."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def make_cache(lm: LoadedModel, plan: PlainPlan, **options: object) -> PlanCache:
    """Return a cache for a model; models without sdpa get the attention function of caches."""
    cache = PlanCache(plan, config=lm.model.config.get_text_config(decoder=True), **options)  # type: ignore[arg-type]
    if lm.model.config._attn_implementation == "eager":
        lm.model.set_attn_implementation("headscan-cache")
    return cache


@torch.no_grad()
def oracle(lm: LoadedModel, plan: PlainPlan, ids: Tensor) -> Tensor:
    """Return the logits of one pass that keeps all keys and masks them per head."""
    with headscan.intervene(lm, KvWindows(plan.kept)):
        return lm.model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def in_chunks(
    lm: LoadedModel, cache: PlanCache, ids: Tensor, chunks: Iterable[int], first: int = 0, **inputs: Tensor
) -> Tensor:
    """Return the logits of passes over consecutive chunks of these sizes from ``first`` on; inputs are cut alike."""
    logits = []
    for size in chunks:
        part = slice(first, first + size)
        more = {name: x[:, : part.stop] if name == "attention_mask" else x[:, part] for name, x in inputs.items()}
        logits.append(lm.model(input_ids=ids[:, part], past_key_values=cache, use_cache=True, **more).logits)
        first += size
    return torch.cat(logits, 1)


@torch.no_grad()
def greedily(lm: LoadedModel, cache: PlanCache, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the ids with ``steps`` greedy tokens, and the logits of all but the last token."""
    logits = [lm.model(input_ids=ids, past_key_values=cache, use_cache=True).logits]
    for step in range(steps):
        ids = torch.cat([ids, logits[-1][:, -1:].argmax(-1)], 1)
        if step < steps - 1:
            logits.append(lm.model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits)
    return ids, torch.cat(logits, 1)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def explicit_logits(
    lm: LoadedModel,
    plan: PlainPlan,
    ids: Tensor,
    seen_BNN: Tensor,
    text_BN: Tensor,
    window_of: Callable[[int, int], Tensor] | None = None,
) -> Tensor:
    """Return the logits of transformers' eager attention with one explicit mask per layer and head: a key is seen if
    ``seen_BNN`` shows it and the window of its KV head does. ``text_BN`` is the index of each token in its own text,
    and its position. ``window_of`` returns the mask of a window by sink and recent; None is the rule of single tokens.
    Llama models only.
    """
    model = lm.model
    query, key = text_BN[:, :, None], text_BN[:, None]
    window_of = window_of or (lambda sink, recent: (key < sink) | (key > query - recent))
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    handles, previous = [], model.config._attn_implementation
    for layer, block in enumerate(model.model.layers):
        kept = []
        for head in (head for head in plan.heads if head.layer == layer):
            if head.action == "window":
                kept.append(seen_BNN & window_of(head.sink, head.recent))
            else:
                kept.append(seen_BNN if head.action == "full" else torch.zeros_like(seen_BNN))
        mask = torch.stack(kept, 1).repeat_interleave(group, 1)
        dropped = torch.tensor([head.action == "drop" for head in plan.heads if head.layer == layer])

        def masked(_: object, args: tuple[Tensor, ...], kwargs: dict[str, object], mask: Tensor = mask) -> object:
            lowest = torch.finfo(torch.float32).min / 2  # eager attention has its softmax in float32
            additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, lowest)
            return args, kwargs | {"attention_mask": additive}

        def emptied(_: object, args: tuple[Tensor, ...], dropped: Tensor = dropped) -> tuple[Tensor, ...]:
            heads = args[0].unflatten(-1, (len(dropped), -1))
            return (heads.masked_fill(dropped[:, None], 0.0).flatten(-2),)

        handles.append(block.self_attn.register_forward_pre_hook(masked, with_kwargs=True))
        handles.append(block.self_attn.o_proj.register_forward_pre_hook(emptied))
    model.set_attn_implementation("eager")
    try:
        return model(ids, position_ids=text_BN.clamp_min(0), use_cache=False).logits
    finally:
        model.set_attn_implementation(previous)
        for handle in handles:
            handle.remove()
