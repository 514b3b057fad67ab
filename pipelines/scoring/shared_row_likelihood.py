"""Log-likelihoods with requests packed into rows.

A row contains their common prefix once.

Rules need whole inputs, but ablate the same heads in most inputs with a common prefix. The prefix is read once for
all of them up to the layer at which their ablated heads differ (`layers.shared_prefixes`). Answers equal those of whole
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from headscan.ablation.ablation import Ablation
from headscan.ablation.masks import HeadMask
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.shared_prefixes import SharedRow, can_share_rows, read_shared_row
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import run_halving
from headscan.pipelines.scoring.batching import pass_cost, pass_tokens
from headscan.pipelines.scoring.likelihood import answers_to, likelihoods_at
from headscan.pipelines.scoring.prefix_walk import (
    LikelihoodResult,
    PrefixNode,
    Read,
    ReadAnswer,
    by_request,
    distinct_reads,
    prefix_tree,
    shareable_tokens,
)
from headscan.pipelines.scoring.token_requests import Likelihood, Request

#: A row may have at least so many times the tokens of its prefix: reading a prefix again costs more than a longer pass.
_PREFIXES = 3


@dataclass(frozen=True)
class Row:
    """Sequences (indices) that share their first ``prefix`` tokens; 0 for a single sequence."""

    prefix: int
    members: tuple[int, ...]


def rows(root: PrefixNode, lengths: Sequence[int], best_tokens: int, most_tokens: int) -> list[Row]:
    """Return rows with all sequences of a prefix tree. They have few tokens in total.

    Args:
        root: The tree.
        lengths: Tokens of each sequence.
        best_tokens: Tokens of a row at which the model is fastest.
        most_tokens: Maximum tokens of a row; only a single longer sequence exceeds it.
    """
    packer = _Packer(lengths, best_tokens, most_tokens)
    return packer.below(root)


@dataclass(frozen=True)
class _Packer:
    lengths: Sequence[int]
    best_tokens: int
    most_tokens: int

    def below(self, node: PrefixNode) -> list[Row]:
        """Return the rows of a node. They are one group per child, or one for all, with the fewest tokens."""
        apart = [row for child in node.children for row in self.below(child)]
        apart += self._cut(node.end, node.rows)
        together = self._cut(node.end, sorted(_members(node)))
        return min(apart, together, key=self._tokens)

    def _cut(self, prefix: int, members: Sequence[int]) -> list[Row]:
        if not prefix:
            return [Row(0, (member,)) for member in members]
        room = min(max(self.best_tokens, _PREFIXES * prefix), self.most_tokens) - prefix
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

    def _tokens(self, found: Sequence[Row]) -> int:
        return sum(row.prefix + sum(self.lengths[m] - row.prefix for m in row.members) for row in found)


def _members(node: PrefixNode) -> Iterator[int]:
    yield from node.rows
    for child in node.children:
        yield from _members(child)


@dataclass(frozen=True)
class SharedRowItem:
    """Requests for one replica whose model can read shared rows. Ablations that differ for every input
    (`Ablation.may_share_rows`) are read whole.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation | None
    batch_tokens: int

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return [score_shared_rows(lm, self)]


def can_read_shared_rows(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if inputs can share their prefixes in rows."""
    return can_share_rows(lm)


def score_shared_rows(lm: LoadedModel, item: SharedRowItem) -> LikelihoodResult:
    """Pool task: answer requests with the item's heads ablated. Every arm uses the kernels of rules."""
    reads = distinct_reads(item.requests)
    found: dict[int, ReadAnswer] = {}
    if item.ablated is None or item.ablated.may_share_rows:
        found = _in_rows(lm, item.ablated, reads, item.batch_tokens)
    alone = [index for index in range(len(reads)) if index not in found]
    answers = answers_to(lm, [reads[index] for index in alone], item.ablated, item.batch_tokens, as_rules=True)
    found.update((alone[place], answer) for place, answer in answers.items())
    return by_request(reads, found)


def _in_rows(
    lm: LoadedModel, ablated: Ablation | None, reads: Sequence[Read], batch_tokens: int
) -> dict[int, ReadAnswer]:
    """Return the answers of reads that share a prefix, by index."""
    lengths = [len(read.ids) for read in reads]
    tree = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), pass_cost(lm.device.type))
    blocks, limit = find_blocks(lm), lm.limits["shared rows"]
    found: dict[int, ReadAnswer] = {}
    with torch.no_grad():
        for row in rows(tree, lengths, pass_tokens(lm.device.type, batch_tokens), batch_tokens):
            if row.prefix:

                def answer(members: list[int], prefix: int = row.prefix) -> list[ReadAnswer]:
                    return _read_row(blocks, ablated, [reads[member] for member in members], prefix)

                for members, answers in run_halving(list(row.members), answer, lengths, limit):
                    found.update(zip(members, answers, strict=True))
    return found


def _read_row(blocks: Blocks, ablated: Ablation | None, reads: Sequence[Read], prefix: int) -> list[ReadAnswer]:
    """Answer reads that share their first ``prefix`` tokens."""
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

    for reading in read_shared_row(blocks, ablated or HeadMask([]), row, forward):
        for member, likelihoods in zip(reading.sequences, reading.value, strict=True):
            answers[member] = ReadAnswer(likelihoods, reading.zeroed_share)
    return [answers[member] for member in range(len(reads))]
