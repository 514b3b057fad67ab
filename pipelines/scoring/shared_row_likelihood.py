"""Likelihoods of prompts that share prefixes in rows, for rules.

Rules need whole inputs, but ablate the same heads in most inputs with a common prefix. A row contains the prefix once,
and it is read for all of them up to the layer at which their ablated heads differ (`layers.shared_rows`). Answers equal
those of whole inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headscan.ablation.intervention import LayerwiseAblation
from headscan.ablation.masks import HeadMask
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.prefix_cache import read_prefix
from headscan.layers.shared_rows import SharedRow, can_share_rows, read_shared_row
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pass_cost, pass_tokens, run_halving
from headscan.pipelines.scoring.likelihood import (
    DistinctInput,
    InputResult,
    by_request,
    distinct_inputs,
    intervening,
    likelihoods_at,
    score_in_batches,
    score_inputs,
    shareable_tokens,
)
from headscan.pipelines.scoring.prefix_tree import PrefixNode, prefix_tree
from headscan.pipelines.scoring.token_requests import ArmItem, LogLikelihood, Request, Responses

#: A row may have at least so many times the tokens of its prefix: reading a prefix again costs more than a longer pass.
_PREFIXES = 3


@dataclass(frozen=True)
class PackedRow:
    """Sequences (indices) that share their first ``prefix`` tokens; 0 for a single sequence."""

    prefix: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class RowPacker:
    """Packs sequences of given ``lengths`` into rows of few tokens in total. ``best_tokens`` is the fastest length of a
    row for the model; only a single sequence exceeds ``most_tokens``.
    """

    lengths: Sequence[int]
    best_tokens: int
    most_tokens: int

    def rows(self, node: PrefixNode) -> list[PackedRow]:
        """Return the rows of a tree of prefixes: those of each child, or one group for all if that has fewer tokens."""
        apart = [row for child in node.children for row in self.rows(child)]
        apart += self._cut(node.end, [member for member, _ in node.rows])
        together = self._cut(node.end, sorted(_members(node)))
        return min(apart, together, key=self._tokens)

    def _cut(self, prefix: int, members: Sequence[int]) -> list[PackedRow]:
        if not prefix:
            return [PackedRow(0, (member,)) for member in members]
        room = _row_tokens(prefix, self.best_tokens, self.most_tokens) - prefix
        cut: list[PackedRow] = []
        row: list[int] = []
        used = 0
        for member in sorted(members, key=lambda m: (-self.lengths[m], m)):
            ending = self.lengths[member] - prefix
            if row and used + ending > room:
                cut.append(PackedRow(prefix, tuple(row)))
                row, used = [], 0
            row.append(member)
            used += ending
        if row:
            cut.append(PackedRow(prefix, tuple(row)))
        return [row if len(row.members) > 1 else PackedRow(0, row.members) for row in cut]

    def _tokens(self, rows: Sequence[PackedRow]) -> int:
        return sum(row.prefix + sum(self.lengths[m] - row.prefix for m in row.members) for row in rows)


def _row_tokens(prefix: int, best_tokens: int, most_tokens: int) -> int:
    """Return the most tokens of a row."""
    return min(max(best_tokens, _PREFIXES * prefix), most_tokens)


def _members(node: PrefixNode) -> Iterator[int]:
    yield from (member for member, _ in node.rows)
    for child in node.children:
        yield from _members(child)


@dataclass(frozen=True)
class SharedRowItem(ArmItem[Request]):
    """Requests for one replica whose model can read shared rows. Requests with an ablation that may not share rows (see
    `LayerwiseAblation`) are read whole.
    """

    def run(self, lm: LoadedModel) -> list[Responses[LogLikelihood]]:
        """Answer requests with the item's heads ablated, with the kernels of rules for every arm."""
        reads = distinct_inputs(self.requests)
        results: dict[int, InputResult] = {}
        ablated = HeadMask([]) if self.intervention is None else self.intervention
        if isinstance(ablated, LayerwiseAblation) and ablated.may_share_rows:
            results = _in_rows(lm, ablated, reads, self.batch_tokens)
        alone = [index for index in range(len(reads)) if index not in results]
        whole = [reads[index] for index in alone]
        with torch.no_grad(), intervening(lm, self.intervention, rule_kernels=True) as record:
            score, read_on = partial(score_inputs, lm, record=record), partial(read_prefix, lm)
            for place, of_read in score_in_batches(lm, whole, self.batch_tokens, False, read_on, score):
                results[alone[place]] = of_read
        return [by_request(reads, results)]


def can_read_shared_rows(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if inputs can share their prefixes in rows."""
    return can_share_rows(lm)


def _in_rows(
    lm: LoadedModel, ablated: LayerwiseAblation, reads: Sequence[DistinctInput], batch_tokens: int
) -> dict[int, InputResult]:
    lengths = [len(read.ids) for read in reads]
    tree = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), pass_cost(lm.device.type))
    blocks, limit = find_blocks(lm), lm.limits["shared rows"]
    best_tokens = pass_tokens(lm.device.type, batch_tokens)
    results: dict[int, InputResult] = {}
    with torch.no_grad():
        for row in RowPacker(lengths, best_tokens, batch_tokens).rows(tree):
            if row.prefix:

                def score(members: list[int], prefix: int = row.prefix) -> list[InputResult]:
                    most = _row_tokens(prefix, best_tokens, batch_tokens)
                    return _read_row(blocks, ablated, [reads[member] for member in members], prefix, most)

                for members, found in run_halving(list(row.members), score, lengths, limit):
                    results.update(zip(members, found, strict=True))
    return results


def _read_row(
    blocks: Blocks, ablated: LayerwiseAblation, reads: Sequence[DistinctInput], prefix: int, most_tokens: int
) -> list[InputResult]:
    lm = blocks.lm
    row = SharedRow(reads[0].ids[:prefix], tuple(read.ids[prefix:] for read in reads))
    results: dict[int, InputResult] = {}

    def forward(part: SharedRow, members: Sequence[int]) -> list[list[LogLikelihood]]:
        inputs = part.inputs(lm.device)
        here = [reads[member] for member in members]
        places = [
            (0, start + place - prefix) for read, start in zip(here, part.starts, strict=True) for place in read.places
        ]
        return likelihoods_at(lm, here, inputs.pop("input_ids"), places, use_cache=False, **inputs)

    cost = pass_cost(lm.device.type)
    parts = read_shared_row(blocks, ablated, row, forward, most_tokens=most_tokens, pass_cost=cost)
    for part in parts:
        for member, likelihoods, share in zip(part.sequences, part.value, part.ablated_shares, strict=True):
            results[member] = InputResult(likelihoods, share)
    return [results[member] for member in range(len(reads))]
