"""Choice of how all arms read prompts, so they stay comparable; likelihoods from a cache with evicted keys.

With an evicting cache the model reads all tokens before the first prediction with full attention, the cache evicts
keys, and the rest is read from it. A pass over the whole input would not show the loss, since its queries see every
key. A text that is scored from its first token on has no context; its tokens see the whole text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import headscan
from headscan.ablation.ablation import Ablation
from headscan.layers.shared_prefixes import shares_prefixes
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import batches, run_halving
from headscan.pipelines.scoring.batching import pad, pass_tokens
from headscan.pipelines.scoring.likelihood import LikelihoodItem, likelihoods_at
from headscan.pipelines.scoring.prefix_walk import LikelihoodResult, Read, ReadAnswer, by_request, distinct_reads
from headscan.pipelines.scoring.shared_row_likelihood import SharedRowItem, can_read_shared_rows
from headscan.pipelines.scoring.token_requests import Request, ScoringItem


@dataclass(frozen=True)
class EvictionItem:
    """Requests for one replica.

    Attributes:
        ablated: An ablation that evicts keys.
        batch_tokens: Tokens of one forward pass, padding included.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation
    batch_tokens: int

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return [score_evicted(lm, self)]


def score_evicted(lm: LoadedModel, item: EvictionItem) -> LikelihoodResult:
    """Pool task: answer requests from caches that evict keys after the context."""
    # Keys are evicted at the end of each request's own context.
    reads = distinct_reads(item.requests, same_context=True)
    lengths = [len(read.ids) for read in reads]
    # Contexts of one batch have the same length, so that none is padded and all evict at the same token.
    groups: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for row, read in enumerate(reads):
        groups[read.first_place, lm.rope_lengths.group(len(read.ids))].append(row)
    found: dict[int, ReadAnswer] = {}

    def answer(rows: list[int]) -> list[ReadAnswer]:
        return _answer(lm, item.ablated, [reads[row] for row in rows])

    with torch.no_grad(), headscan.intervene(lm, item.ablated):
        for members in groups.values():
            for batch in batches([lengths[row] for row in members], pass_tokens(lm.device.type, item.batch_tokens)):
                rows = [members[i] for i in batch]
                for chosen, answers in run_halving(rows, answer, lengths, lm.limits["evictions"]):
                    found.update(zip(chosen, answers, strict=True))
    return by_request(reads, found)


def _answer(lm: LoadedModel, ablated: Ablation, reads: list[Read]) -> list[ReadAnswer]:
    """Return the answers of reads whose contexts have the same length."""
    start = reads[0].first_place
    if start:
        # The context is read alone, so it needs the rotary frequencies of the whole text.
        lm.rope_lengths.check(max(len(read.ids) for read in reads), [start])
    cache = ablated.new_cache(lm, context=start > 0)
    if start:
        contexts = list(dict.fromkeys(read.ids[:start] for read in reads))
        ids = torch.tensor(contexts, device=lm.device)
        run(lm.model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
        if len(contexts) < len(reads):
            row_of = {context: row for row, context in enumerate(contexts)}
            # Selecting rows as beam search does also works for recurrent states, and for layers on other devices.
            cache.reorder_cache(torch.tensor([row_of[read.ids[:start]] for read in reads]))  # type: ignore[arg-type]
    ids, _ = pad([read.ids[start:] for read in reads])
    places = [(row, place - start) for row, read in enumerate(reads) for place in read.places]
    likelihoods = likelihoods_at(lm, reads, ids, places, past_key_values=cache, use_cache=True)
    return [ReadAnswer(of_read, 0.0) for of_read in likelihoods]


#: Dtypes in which the order of summation changes answers.
HALF = ("bfloat16", "float16")

#: Runs a pool task on the model and returns its result.
Ask = Callable[[Callable[[LoadedModel, Any], bool], None], bool]


class Reading(NamedTuple):
    """How prompts are read.

    Attributes:
        share_prefixes: Common prefixes are read once, into a KV cache.
        shared_rows: Rules, which cannot continue from a KV cache, share prefixes in rows.
        as_rules: All arms use the kernels of rules, and rows if rules do.
        rope: The sequence lengths at which the model's rotary frequencies change.
    """

    share_prefixes: bool
    shared_rows: bool = False
    as_rules: bool = False
    rope: RopeLengths = UNVARYING

    def item(
        self, name: str, requests: tuple[Request, ...], ablated: Ablation | None, batch_tokens: int
    ) -> ScoringItem:
        """Return the item in which one replica answers requests under an ablation."""
        if ablated is not None and ablated.evicts:
            return EvictionItem(name, requests, ablated, batch_tokens)
        if self.shared_rows and (self.as_rules or (ablated is not None and ablated.needs_whole_input)):
            return SharedRowItem(name, requests, ablated, batch_tokens)
        return LikelihoodItem(name, requests, ablated, batch_tokens, self.share_prefixes, self.as_rules, self.rope)


def computed_as_rules(dtype: str, ablated: Sequence[Ablation | None]) -> bool:
    """Return True if all arms need the kernels of rules. Otherwise their answers would not be comparable.

    In half precision kernels round differently, which would add to every difference to the baseline.
    """
    return dtype in HALF and any(each is not None and each.replaces_attention for each in ablated)


def reads_whole(dtype: str, ablated: Sequence[Ablation | None]) -> bool:
    """Return True if all arms read whole inputs, as resampled heads do. Kernels round differently in half precision."""
    return dtype in HALF and any(each is not None and not each.replaces_by.position_free for each in ablated)


def choose_reading(
    ask: Ask, dtype: str, ablated: Sequence[Ablation | None], share: bool | None, say: Callable[[str], None]
) -> Reading:
    """Return the fastest way of reading under which all arms are comparable.

    Args:
        ask: Runs a pool task on the model.
        dtype: Dtype of the model.
        ablated: Ablations of the arms; None for the baseline.
        share: True shares prefixes, False does not; None shares them if all arms are computed with the same kernels.
        say: Receives the reason if prefixes are not shared.
    """
    as_rules = computed_as_rules(dtype, ablated)
    whole = Reading(False, as_rules=as_rules)
    if share is False:
        return whole
    if share is None and reads_whole(dtype, ablated):
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and resampled heads need whole inputs")
        return whole
    rules = any(each is not None and each.needs_whole_input for each in ablated)
    if (rules or as_rules) and ask(can_read_shared_rows, None):
        return Reading(True, shared_rows=True, as_rules=as_rules)
    if as_rules and share is None:
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and this model cannot share rows")
        return whole
    if not ask(can_share_prefixes, None):
        say("prompts are read whole: continuing from a cached prefix changes the hidden states of this model")
        return whole
    return Reading(True)


def can_share_prefixes(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if common prefixes can be read once."""
    return shares_prefixes(lm)
