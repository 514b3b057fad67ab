"""Log-likelihoods with requests packed into rows.

A row contains their common prefix once.

Rules need whole inputs, but ablate the same heads in most inputs with a common prefix. The prefix is read once for all
of them up to the layer at which their ablated heads differ (`shared_row_pass`). Answers equal those of whole inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headscan.ablation.ablation import Ablation
from headscan.ablation.masks import HeadMask
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.shared_row_pass import can_share_rows, read_shared_row
from headscan.layers.shared_rows import SharedRow
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import run_halving
from headscan.pipelines.scoring.batching import pass_cost, pass_tokens
from headscan.pipelines.scoring.likelihood import answers_to, likelihoods_at
from headscan.pipelines.scoring.prefix_walk import shareable_tokens
from headscan.pipelines.scoring.prefixes.prefix_tree import prefix_tree
from headscan.pipelines.scoring.prefixes.row_packing import rows
from headscan.pipelines.scoring.reads import LikelihoodResult, Read, ReadAnswer, by_request, distinct_reads
from headscan.pipelines.scoring.token_requests import Likelihood, Request


@dataclass(frozen=True)
class SharedRowItem:
    """Requests for one replica whose model can read shared rows.

    Ablations that differ for every input (`Ablation.may_share_rows`) are read whole.
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
    """Pool task: answer requests with the item's heads ablated.

    Every arm uses the kernels of rules.
    """
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
