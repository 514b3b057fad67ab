"""All reads of a model in batches, common prefixes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import batches, run_halving
from headscan.pipelines.scoring.batching import pass_cost, pass_tokens
from headscan.pipelines.scoring.prefixes.prefix_groups import PrefixGroup, group_prefixes
from headscan.pipelines.scoring.prefixes.prefix_tree import prefix_tree
from headscan.pipelines.scoring.reads import Read

P = TypeVar("P")
A = TypeVar("A")

#: A batch that continues a prefix holds the prefix once per sequence, but in one layer at a time: a prefix token takes
#: at most 1 / _PREFIX_WEIGHT of the memory of other tokens.
_PREFIX_WEIGHT = 4

#: Passes of this many times the cost of a pass gain little from further sequences.
_GROUPED_COSTS = 8


@dataclass(frozen=True)
class Continued(Generic[P]):
    """What a batch of reads continues.

    Attributes:
        start: Tokens read before.
        prefix: Their prefixes; None if `start` is 0.
        rows: The prefix of each read.
    """

    start: int
    prefix: P | None
    rows: tuple[int, ...]


def grouped_tokens(device: str) -> int:
    """Return the most tokens of prefixes that are read in one batch on a type of device."""
    return _GROUPED_COSTS * pass_cost(device)


def shareable_tokens(lm: LoadedModel, reads: Sequence[Read]) -> list[int]:
    """Return each read's number of tokens that may be shared.

    A prefix is shorter than the reads that share it, and must be read with the same rotary frequencies.
    """
    rope = lm.rope_lengths
    return [read.first_place if rope.group(len(read.ids)) == rope.group(1) else 0 for read in reads]


def walk(
    lm: LoadedModel,
    reads: Sequence[Read],
    batch_tokens: int,
    share_prefixes: bool,
    read_on: Callable[[Sequence[Sequence[int]], P | None], P],
    answer: Callable[[list[Read], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    """Run all reads in batches, common prefixes first.

    Args:
        read_on: Reads the tokens (R, N) after a prefix (None starts at the first token) and returns R longer prefixes.
        answer: Answers a batch of reads from their prefixes on.

    Yields:
        The index of a read, and its result of ``answer``.
    """
    cost, limit = pass_cost(lm.device.type), lm.limits["reads"]
    batch_tokens = pass_tokens(lm.device.type, batch_tokens)
    root = PrefixGroup(0, (), tuple((row, 0) for row in range(len(reads))))
    if share_prefixes:
        tree = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), cost)
        root = group_prefixes(tree, cost, min(batch_tokens, grouped_tokens(lm.device.type)))
    # A prefix stays in memory while reads or longer prefixes continue from it.
    todo: list[tuple[PrefixGroup, P | None]] = [(root, None)]
    while todo:
        group, prefix = todo.pop()
        parts: list[tuple[list[int], P | None]] = [([0], None)]
        if group.tokens:
            tokens, parent = group.tokens, prefix

            def longer(chosen: list[int], tokens: Sequence[Sequence[int]] = tokens, parent: P | None = parent) -> P:
                return read_on([tokens[index] for index in chosen], parent)

            parts = [*run_halving(list(range(len(tokens))), longer, [len(each) for each in tokens], limit)]
        for chosen, prefix in parts:
            yield from _answered(lm, reads, group, chosen, prefix, batch_tokens, answer)
        todo += [(child, prefix) for child in group.children]


def _answered(
    lm: LoadedModel,
    reads: Sequence[Read],
    group: PrefixGroup,
    chosen: Sequence[int],
    prefix: P | None,
    batch_tokens: int,
    answer: Callable[[list[Read], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    """Answer the reads that continue the chosen prefixes of a group."""
    place = {index: row for row, index in enumerate(chosen)}
    rows = [(read, place[index]) for read, index in group.rows if index in place]
    lengths = [_weight(len(reads[read].ids) - group.end, group.end) for read, _ in rows]
    groups = [lm.rope_lengths.group(len(reads[read].ids)) for read, _ in rows]

    def answers(batch: list[int]) -> list[A]:
        after = Continued(group.end, prefix, tuple(rows[i][1] for i in batch))
        return answer([reads[rows[i][0]] for i in batch], after)

    for batch in batches(lengths, batch_tokens, pass_cost=pass_cost(lm.device.type), groups=groups):
        for part, found in run_halving(batch, answers, lengths, lm.limits["reads"]):
            yield from zip((rows[i][0] for i in part), found, strict=True)


def _weight(tokens: int, prefix: int) -> int:
    return max(tokens, -(-(prefix + tokens) // _PREFIX_WEIGHT)) if prefix else tokens
