"""How all arms of a run read prompts, so that their answers stay comparable, and which item answers them.

`PromptReading.item` makes an item of the requests, and its ``run`` answers them. The first row that holds decides:

==================================================================  ================  =======================
if                                                                  item              module
==================================================================  ================  =======================
several arms (masks and baseline) share layers                      `BundleItem`      `bundles`
the model continues prompts: a `GenerationRequest`                  `GenerationItem`  `generation`
``intervention.evicts``: a plan in mode ``decode``                  `EvictionItem`    `eviction`
``shared_rows`` and ``intervention.needs_whole_input``: a rule      `SharedRowItem`   `shared_row_likelihood`
``shared_rows`` and ``headscan_kernels``: any arm that rounds so    `SharedRowItem`   `shared_row_likelihood`
otherwise: masks, baseline, rules where prompts share no rows       `LikelihoodItem`  `likelihood`
==================================================================  ================  =======================

`choose_reading` sets ``headscan_kernels`` if all arms must round as one of them does, such as a rule or a window mask
in half precision, and ``shared_rows`` if the model can share rows, for these arms or for a rule. Every arm of a model
that runs by layer ranges is a `LikelihoodItem`, which `answering` passes to `staged_likelihood.answer_in_ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headscan.ablation.intervention import Ablation, Intervention
from headscan.cluster.pool import Pool
from headscan.engine.bundles import BundleItem, Start, start_of
from headscan.engine.eviction import EvictionItem
from headscan.engine.likelihood import LikelihoodItem
from headscan.engine.shared_row_likelihood import SharedRowItem, can_share_rows_task
from headscan.layers.prefix_cache import shares_prefixes
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.texts.token_requests import GenerationRequest, ScoringItem

#: Dtypes in which the order of summation changes answers.
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class PromptReading:
    """How prompts are read.

    Attributes:
        share_prefixes: Common prefixes are read once, into a KV cache, or in shared rows.
        shared_rows: Rules, which cannot continue from a KV cache, share prefixes in rows.
        headscan_kernels: All arms use headscan's attention kernels, and rows if ``shared_rows``.
        starts: Where the passes of masks in one item can start.
    """

    share_prefixes: bool
    shared_rows: bool = False
    headscan_kernels: bool = False
    rope: RopeLengths = UNVARYING
    starts: frozenset[Start] = frozenset()

    def item(
        self, name: str, requests: tuple[Any, ...], interventions: Sequence[Intervention | None], batch_tokens: int
    ) -> ScoringItem[Any]:
        """Return the item of requests of one kind under the ``interventions`` of its arms; several bundle their passes,
        for scored requests only.
        """
        if len(interventions) > 1:
            starts = tuple(start_of(mask, self.starts) for mask in interventions)
            share_prefixes = self.share_prefixes and all(
                mask is None or mask.may_share_prefix for mask in interventions
            )
            return BundleItem(name, requests, tuple(interventions), starts, batch_tokens, share_prefixes)
        [intervention] = interventions
        if isinstance(requests[0], GenerationRequest):
            # Generation needs lm-eval, which benchmarks of scoring do without.
            from headscan.engine.generation import GenerationItem

            return GenerationItem(name, requests, intervention, batch_tokens, one_by_one=self.headscan_kernels)
        if intervention is not None and intervention.evicts:
            return EvictionItem(name, requests, intervention, batch_tokens)
        if self.shared_rows and (
            self.headscan_kernels or (intervention is not None and intervention.needs_whole_input)
        ):
            return SharedRowItem(name, requests, intervention, batch_tokens)
        return LikelihoodItem(
            name, requests, intervention, batch_tokens, self.share_prefixes, self.headscan_kernels, self.rope
        )


def need_headscan_kernels(dtype: str, interventions: Sequence[Intervention | None]) -> bool:
    """Return True if all arms need headscan's attention kernels, because one of them does, such as a rule, a random
    rule or a window mask: in half precision kernels round differently, which would add to every difference to the
    baseline.
    """
    return dtype in HALF and any(
        intervention is not None and intervention.uses_headscan_kernels for intervention in interventions
    )


def need_whole_inputs(dtype: str, interventions: Sequence[Intervention | None]) -> bool:
    """Return True if all arms need whole inputs, because one of them resamples heads: kernels round differently in
    half precision.
    """
    return dtype in HALF and any(
        isinstance(intervention, Ablation) and not intervention.replacement.position_free
        for intervention in interventions
    )


def choose_reading(
    pool: Pool,
    dtype: str,
    rope: RopeLengths,
    interventions: Sequence[Intervention | None],
    share_prefixes: bool | None,
    say: Callable[[str], None],
) -> PromptReading:
    """Return the fastest way of reading under which all arms are comparable; ``dtype`` and ``rope`` are those of the
    pool's model.

    Args:
        share_prefixes: False reads prompts whole; True shares prefixes if the model can; None shares them only if all
            arms can also use the same kernels.
        say: Receives the reason if prefixes are not shared.
    """
    headscan_kernels = need_headscan_kernels(dtype, interventions)
    whole = PromptReading(False, headscan_kernels=headscan_kernels, rope=rope)
    if share_prefixes is False:
        return whole
    if share_prefixes is None and need_whole_inputs(dtype, interventions):
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and resampled heads need whole inputs")
        return whole
    rules = any(intervention is not None and intervention.needs_whole_input for intervention in interventions)
    if (rules or headscan_kernels) and pool.one(can_share_rows_task, None):
        return PromptReading(True, shared_rows=True, headscan_kernels=headscan_kernels, rope=rope)
    if headscan_kernels and share_prefixes is None:
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and this model cannot share rows")
        return whole
    if not pool.one(can_share_prefixes_task, None):
        say("prompts are read whole: continuing from a cached prefix changes the hidden states of this model")
        return whole
    return PromptReading(True, rope=rope)


def can_share_prefixes_task(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if common prefixes can be read once."""
    return shares_prefixes(lm)
