"""How all arms read prompts, so that they stay comparable, and prompts of rules in shared rows.

Rules need whole inputs, but ablate the same heads in most inputs with a common prefix. A row contains the prefix once,
and it is read for all of them up to the layer at which their ablated heads differ (`layers.shared_prefixes`). Answers
equal those of whole inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headscan.ablation.ablation import Ablation
from headscan.ablation.masks import HeadMask
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.shared_prefixes import SharedRow, can_share_rows, read_shared_row, shares_prefixes
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import pass_tokens, run_halving
from headscan.pipelines.scoring.eviction import EvictionItem
from headscan.pipelines.scoring.likelihood import (
    LikelihoodItem,
    PrefixNode,
    Read,
    ReadAnswer,
    answers_to,
    by_request,
    distinct_reads,
    likelihoods_at,
    prefix_tree,
    shareable_tokens,
)
from headscan.pipelines.scoring.token_requests import (
    AnswerSet,
    Likelihood,
    Request,
    ScoringItem,
    pass_cost,
)

#: A row may have at least so many times the tokens of its prefix: reading a prefix again costs more than a longer pass.
_PREFIXES = 3


@dataclass(frozen=True)
class Row:
    """Sequences (indices) that share their first ``prefix`` tokens; 0 for a single sequence."""

    prefix: int
    members: tuple[int, ...]


def rows(root: PrefixNode, lengths: Sequence[int], best_tokens: int, most_tokens: int) -> list[Row]:
    """Return rows of few tokens in total with all sequences of a prefix tree. ``best_tokens`` is the fastest length of
    a row for the model; only a single sequence exceeds ``most_tokens``.
    """
    packer = _Packer(lengths, best_tokens, most_tokens)
    return packer.below(root)


@dataclass(frozen=True)
class _Packer:
    lengths: Sequence[int]
    best_tokens: int
    most_tokens: int

    def below(self, node: PrefixNode) -> list[Row]:
        """Return the rows of a node: one group per child, or one for all, whichever has fewer tokens."""
        apart = [row for child in node.children for row in self.below(child)]
        apart += self._cut(node.end, node.rows)
        together = self._cut(node.end, sorted(_members(node)))
        return min(apart, together, key=self._tokens)

    def _cut(self, prefix: int, members: Sequence[int]) -> list[Row]:
        if not prefix:
            return [Row(0, (member,)) for member in members]
        room = _row_tokens(prefix, self.best_tokens, self.most_tokens) - prefix
        cut: list[Row] = []
        row: list[int] = []
        used = 0
        for member in sorted(members, key=lambda m: (-self.lengths[m], m)):
            ending = self.lengths[member] - prefix
            if row and used + ending > room:
                cut.append(Row(prefix, tuple(row)))
                row, used = [], 0
            row.append(member)
            used += ending
        if row:
            cut.append(Row(prefix, tuple(row)))
        return [row if len(row.members) > 1 else Row(0, row.members) for row in cut]

    def _tokens(self, rows: Sequence[Row]) -> int:
        return sum(row.prefix + sum(self.lengths[m] - row.prefix for m in row.members) for row in rows)


def _row_tokens(prefix: int, best_tokens: int, most_tokens: int) -> int:
    """Return the most tokens of a row."""
    return min(max(best_tokens, _PREFIXES * prefix), most_tokens)


def _members(node: PrefixNode) -> Iterator[int]:
    yield from node.rows
    for child in node.children:
        yield from _members(child)


@dataclass(frozen=True)
class SharedRowItem:
    """Requests for one replica whose model can read shared rows. Ablations that differ for every input (those without
    `Ablation.may_share_rows`) are read whole.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation | None
    batch_tokens: int

    def run(self, lm: LoadedModel) -> list[AnswerSet[Likelihood]]:
        return [score_shared_rows(lm, self)]


def can_read_shared_rows(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if inputs can share their prefixes in rows."""
    return can_share_rows(lm)


def score_shared_rows(lm: LoadedModel, item: SharedRowItem) -> AnswerSet[Likelihood]:
    """Answer requests with the item's heads ablated, with the kernels of rules for every arm."""
    reads = distinct_reads(item.requests)
    answered: dict[int, ReadAnswer] = {}
    if item.ablated is None or item.ablated.may_share_rows:
        answered = _in_rows(lm, item.ablated, reads, item.batch_tokens)
    alone = [index for index in range(len(reads)) if index not in answered]
    answers = answers_to(lm, [reads[index] for index in alone], item.ablated, item.batch_tokens, as_rules=True)
    answered.update((alone[place], answer) for place, answer in answers.items())
    return by_request(reads, answered)


def _in_rows(
    lm: LoadedModel, ablated: Ablation | None, reads: Sequence[Read], batch_tokens: int
) -> dict[int, ReadAnswer]:
    lengths = [len(read.ids) for read in reads]
    tree = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), pass_cost(lm.device.type))
    blocks, limit = find_blocks(lm), lm.limits["shared rows"]
    best_tokens = pass_tokens(lm.device.type, batch_tokens)
    answered: dict[int, ReadAnswer] = {}
    with torch.no_grad():
        for row in rows(tree, lengths, best_tokens, batch_tokens):
            if row.prefix:

                def answer(members: list[int], prefix: int = row.prefix) -> list[ReadAnswer]:
                    most = _row_tokens(prefix, best_tokens, batch_tokens)
                    return _read_row(blocks, ablated, [reads[member] for member in members], prefix, most)

                for members, answers in run_halving(list(row.members), answer, lengths, limit):
                    answered.update(zip(members, answers, strict=True))
    return answered


def _read_row(
    blocks: Blocks, ablated: Ablation | None, reads: Sequence[Read], prefix: int, most_tokens: int
) -> list[ReadAnswer]:
    lm = blocks.lm
    row = SharedRow(reads[0].ids[:prefix], tuple(read.ids[prefix:] for read in reads))
    answers: dict[int, ReadAnswer] = {}

    def forward(part: SharedRow, members: Sequence[int]) -> list[list[Likelihood]]:
        inputs = part.inputs(lm.device)
        here = [reads[member] for member in members]
        places = [
            (0, start + place - prefix) for read, start in zip(here, part.starts, strict=True) for place in read.places
        ]
        return likelihoods_at(lm, here, inputs.pop("input_ids"), places, use_cache=False, **inputs)

    cost = pass_cost(lm.device.type)
    parts = read_shared_row(blocks, ablated or HeadMask([]), row, forward, most_tokens=most_tokens, pass_cost=cost)
    for part in parts:
        for member, likelihoods, share in zip(part.sequences, part.value, part.zeroed_shares, strict=True):
            answers[member] = ReadAnswer(likelihoods, share)
    return [answers[member] for member in range(len(reads))]


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
    """

    share_prefixes: bool
    shared_rows: bool = False
    as_rules: bool = False
    rope: RopeLengths = UNVARYING

    def item(
        self, name: str, requests: tuple[Request, ...], ablated: Ablation | None, batch_tokens: int
    ) -> ScoringItem:
        if ablated is not None and ablated.evicts:
            return EvictionItem(name, requests, ablated, batch_tokens)
        if self.shared_rows and (self.as_rules or (ablated is not None and ablated.needs_whole_input)):
            return SharedRowItem(name, requests, ablated, batch_tokens)
        return LikelihoodItem(name, requests, ablated, batch_tokens, self.share_prefixes, self.as_rules, self.rope)


def computed_as_rules(dtype: str, ablated: Sequence[Ablation | None]) -> bool:
    """Return True if all arms need the kernels of rules: in half precision kernels round differently, which would add
    to every difference to the baseline.
    """
    return dtype in HALF and any(ablation is not None and ablation.replaces_attention for ablation in ablated)


def reads_whole(dtype: str, ablated: Sequence[Ablation | None]) -> bool:
    """Return True if all arms read whole inputs, as resampled heads do. Kernels round differently in half precision."""
    return dtype in HALF and any(
        ablation is not None and not ablation.replaces_by.position_free for ablation in ablated
    )


def choose_reading(
    ask: Ask, dtype: str, ablated: Sequence[Ablation | None], share: bool | None, say: Callable[[str], None]
) -> Reading:
    """Return the fastest way of reading under which all arms are comparable. ``share`` False shares no prefixes, and
    None only if all arms use the same kernels; ``say`` receives the reason if they are not shared.
    """
    as_rules = computed_as_rules(dtype, ablated)
    whole = Reading(False, as_rules=as_rules)
    if share is False:
        return whole
    if share is None and reads_whole(dtype, ablated):
        say(f"prompts are read whole: in {dtype} all arms need the same kernels, and resampled heads need whole inputs")
        return whole
    rules = any(ablation is not None and ablation.needs_whole_input for ablation in ablated)
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
