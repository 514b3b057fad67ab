"""Log-likelihoods with a rule in force, prefixes shared: what several requests begin with is read in one row with them.

A rule silences the same heads in most inputs of one kind, so their common prefix is read once for all of them up to the
layer where they part, if they do (`headscan.packs`). The answers are those of whole inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import headscan
from headscan.blocks import Blocks, find_blocks
from headscan.interventions import HeadRule
from headscan.loaded_model import LoadedModel
from headscan.packs import Pack, can_pack, read_pack
from pipelines.batching import run_halving
from pipelines.likelihood import (
    LikelihoodResult,
    Read,
    ReadAnswer,
    answer_reads,
    by_request,
    distinct_reads,
    likelihoods_at,
    pass_cost,
    pass_tokens,
    walk,
)
from pipelines.packing import rows
from pipelines.prefix_tree import prefix_tree
from pipelines.requests import Likelihood, Request


@dataclass(frozen=True)
class PackedRuleItem:
    """Requests for one replica, to be answered with a rule in force by a model that can read packs."""

    name: str
    requests: tuple[Request, ...]
    rule: HeadRule
    batch_tokens: int


def can_pack_rules(lm: LoadedModel, item: object) -> bool:
    """A pool task: whether inputs can share their prefixes under rules."""
    return can_pack(lm)


def score_packed(lm: LoadedModel, item: PackedRuleItem) -> LikelihoodResult:
    """A pool task: answer requests with the rule in force."""
    reads = distinct_reads(item.requests)
    lengths = [len(read.ids) for read in reads]
    tree = prefix_tree([read.ids for read in reads], [read.first_place for read in reads], pass_cost(lm))
    plan = rows(tree, lengths, pass_tokens(lm, item.batch_tokens), item.batch_tokens)
    blocks, limit = find_blocks(lm), lm.limits["packed rules"]
    found: dict[int, ReadAnswer] = {}
    with torch.no_grad():
        for row in plan:
            if row.prefix:

                def answer(members: list[int], prefix: int = row.prefix) -> list[ReadAnswer]:
                    return _read_row(blocks, item.rule, [reads[member] for member in members], prefix)

                for members, answers in run_halving(list(row.members), answer, lengths, limit):
                    found.update(zip(members, answers, strict=True))
        alone = [row.members[0] for row in plan if not row.prefix]
        answers_alone = _read_alone(lm, item.rule, [reads[member] for member in alone], item.batch_tokens)
        found.update((alone[index], answer) for index, answer in answers_alone)
    return by_request(reads, found)


def _read_row(blocks: Blocks, rule: HeadRule, reads: Sequence[Read], prefix: int) -> list[ReadAnswer]:
    """Answer reads that share so many tokens."""
    lm = blocks.lm
    pack = Pack(reads[0].ids[:prefix], tuple(read.ids[prefix:] for read in reads))
    answers: dict[int, ReadAnswer] = {}

    def forward(part: Pack, members: Sequence[int]) -> list[list[Likelihood]]:
        inputs = part.inputs(lm.device)
        here = [reads[member] for member in members]
        places = [
            (0, start + place - prefix) for read, start in zip(here, part.starts, strict=True) for place in read.places
        ]
        return likelihoods_at(lm, here, inputs.pop("input_ids"), places, use_cache=False, **inputs)

    for reading in read_pack(blocks, rule, pack, forward):
        for member, likelihoods in zip(reading.sequences, reading.value, strict=True):
            answers[member] = ReadAnswer(likelihoods, reading.zeroed_share)
    return [answers[member] for member in range(len(reads))]


def _read_alone(
    lm: LoadedModel, rule: HeadRule, reads: Sequence[Read], batch_tokens: int
) -> Iterator[tuple[int, ReadAnswer]]:
    """Answer reads that share nothing."""
    with headscan.intervene(lm, rule) as record:

        def read_on(tokens: Sequence[int], parent: None) -> None:
            raise AssertionError("nothing is shared")

        def answer(chosen: list[Read], start: int, prefix: None) -> list[ReadAnswer]:
            return answer_reads(lm, chosen, start, prefix, record)

        yield from walk(lm, reads, batch_tokens, False, read_on, answer)
