"""Likelihoods of prompts that share prefixes in rows: of rules, and in half precision of all arms that round alike.

Rules need whole inputs, but ablate the same heads in most inputs with a common prefix. A row contains the prefix once,
and it is read for all of them up to the layer at which their ablated heads differ (`layers.shared_rows`). Answers equal
those of whole inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headscan.ablation.intervention import Intervention, LayerwiseAblation
from headscan.ablation.masks import HeadMask
from headscan.engine.likelihood import (
    DistinctInput,
    InputResult,
    answer_in_batches,
    answer_inputs,
    by_request,
    distinct_inputs,
    intervening,
    likelihoods_at,
    shareable_tokens,
)
from headscan.layers.blocks import find_blocks
from headscan.layers.prefix_cache import read_prefix
from headscan.layers.shared_rows import SharedRow, read_shared_row
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pass_cost, pass_tokens, run_halving_by_size
from headscan.texts.prefix_tree import PrefixNode, prefix_tree
from headscan.texts.token_requests import LogLikelihood, Request, Responses

#: Most tokens of a row for each token of its prefix, if that is more than the fastest length of a row: reading a prefix
#: again costs more than a longer pass.
_TOKENS_PER_PREFIX_TOKEN = 3


@dataclass(frozen=True)
class PackedRow:
    """Sequences (indices) that share their first ``prefix_tokens`` tokens; 0 for a single sequence."""

    prefix_tokens: int
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
        """Return the rows of a tree of prefixes: those of each child, and of the node's own sequences, or rows that all
        share the node's prefix if they have fewer tokens.
        """
        apart = [row for child in node.children for row in self.rows(child)]
        apart += self._cut(node.end, [index for index, _ in node.sequences])
        together = self._cut(node.end, sorted(_members(node)))
        return min(apart, together, key=lambda rows: sum(self.tokens(row.prefix_tokens, row.members) for row in rows))

    def tokens(self, prefix_tokens: int, members: Sequence[int]) -> int:
        """Return the tokens of a row: its prefix once, and the ending of each member."""
        return prefix_tokens + sum(self.lengths[member] - prefix_tokens for member in members)

    def most_row_tokens(self, prefix_tokens: int) -> int:
        """Return the most tokens of a row with a prefix of so many tokens."""
        return min(max(self.best_tokens, _TOKENS_PER_PREFIX_TOKEN * prefix_tokens), self.most_tokens)

    def _cut(self, prefix_tokens: int, members: Sequence[int]) -> list[PackedRow]:
        """Return rows of these members, the longest first; a member that is alone in its row shares no prefix."""
        if not prefix_tokens:
            return [PackedRow(0, (member,)) for member in members]
        most_ending_tokens = self.most_row_tokens(prefix_tokens) - prefix_tokens
        rows: list[list[int]] = []
        row_ending_tokens = 0
        for member in sorted(members, key=lambda m: (-self.lengths[m], m)):
            ending_tokens = self.lengths[member] - prefix_tokens
            if not rows or row_ending_tokens + ending_tokens > most_ending_tokens:
                rows.append([])
                row_ending_tokens = 0
            rows[-1].append(member)
            row_ending_tokens += ending_tokens
        return [PackedRow(prefix_tokens if len(row) > 1 else 0, tuple(row)) for row in rows]


def _members(node: PrefixNode) -> Iterator[int]:
    yield from (index for index, _ in node.sequences)
    for child in node.children:
        yield from _members(child)


def shared_row_likelihoods(
    lm: LoadedModel, requests: Sequence[Request], change: Intervention | None, batch_tokens: int
) -> Responses[LogLikelihood]:
    """Answer requests under one change with headscan's attention kernels, on a model that can read shared rows. Under a
    change that may not share them (one that is no `LayerwiseAblation`, or whose `may_share_rows` is False) requests are
    read whole.
    """
    inputs = distinct_inputs(requests)
    results: dict[int, InputResult] = {}
    ablation = HeadMask([]) if change is None else change
    if isinstance(ablation, LayerwiseAblation) and ablation.may_share_rows:
        results = _RowReader(lm, ablation, inputs, batch_tokens).results()
    whole = [index for index in range(len(inputs)) if index not in results]
    whole_inputs = [inputs[index] for index in whole]
    with torch.no_grad(), intervening(lm, change, headscan_kernels=True) as record:
        answer_batch, read_prefixes = partial(answer_inputs, lm, record=record), partial(read_prefix, lm)
        scored = answer_in_batches(lm, whole_inputs, batch_tokens, False, read_prefixes, answer_batch)
        results |= {whole[index]: result for index, result in scored}
    return by_request(inputs, results)


class _RowReader:
    """Reads the inputs that share prefixes, in rows, with heads ablated."""

    def __init__(
        self, lm: LoadedModel, ablation: LayerwiseAblation, inputs: Sequence[DistinctInput], batch_tokens: int
    ) -> None:
        self._lm, self._ablation, self._inputs = lm, ablation, inputs
        self._blocks = find_blocks(lm)
        self._lengths = [len(one_input.ids) for one_input in inputs]
        self._packer = RowPacker(self._lengths, pass_tokens(lm.device.type, batch_tokens), batch_tokens)
        self._pass_cost = pass_cost(lm.device.type)

    @torch.no_grad()
    def results(self) -> dict[int, InputResult]:
        """Return the results by input (index); those of inputs that share no prefix are missing."""
        ids = [one_input.ids for one_input in self._inputs]
        tree = prefix_tree(ids, shareable_tokens(self._lm, self._inputs), self._pass_cost)
        limit = self._lm.limits["shared rows"]
        results: dict[int, InputResult] = {}
        for row in self._packer.rows(tree):
            if row.prefix_tokens:
                read_row = partial(self._read_row, row.prefix_tokens)
                row_tokens = partial(self._packer.tokens, row.prefix_tokens)
                for _, row_results in run_halving_by_size(list(row.members), read_row, row_tokens, limit):
                    results |= row_results
        return results

    def _read_row(self, prefix_tokens: int, members: list[int]) -> dict[int, InputResult]:
        """Return the results of inputs (indices) that share their first tokens, read in one row."""
        endings = tuple(self._inputs[member].ids[prefix_tokens:] for member in members)
        row = SharedRow(self._inputs[members[0]].ids[:prefix_tokens], endings)
        row_results = read_shared_row(
            self._blocks,
            self._ablation,
            row,
            partial(self._read_endings, members),
            most_tokens=self._packer.most_row_tokens(prefix_tokens),
            pass_cost=self._pass_cost,
        )
        results: dict[int, InputResult] = {}
        for row_result in row_results:
            values = zip(row_result.sequences, row_result.value, row_result.ablated_shares, strict=True)
            for ending, likelihoods, ablated_share in values:
                results[members[ending]] = InputResult(likelihoods, ablated_share)
        return results

    def _read_endings(
        self, members: Sequence[int], row: SharedRow, ending_indices: list[int]
    ) -> list[list[LogLikelihood]]:
        """Return the log-likelihoods of some endings of the members' row, from one pass over ``row``, which has only
        these.
        """
        inputs = [self._inputs[members[index]] for index in ending_indices]
        positions = [
            (0, start + position - len(row.prefix))
            for one_input, start in zip(inputs, row.ending_starts, strict=True)
            for position in one_input.scored_positions
        ]
        return likelihoods_at(self._lm, inputs, positions=positions, use_cache=False, **row.inputs(self._lm.device))
