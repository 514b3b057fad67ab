"""Packing of token sequences into rows with common prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headscan.pipelines.scoring.prefixes.prefix_tree import PrefixNode

#: A row may have at least so many times the tokens of its prefix: reading a prefix again costs more than a longer pass.
_PREFIXES = 3


@dataclass(frozen=True)
class Row:
    """Sequences (indices) that share their first ``prefix`` tokens; 0 for a single sequence."""

    prefix: int
    members: tuple[int, ...]


def rows(root: PrefixNode, lengths: Sequence[int], best_tokens: int, most_tokens: int) -> list[Row]:
    """Return rows with all sequences of a prefix tree.

    They have few tokens in total.

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
        """Return the rows of a node.

        They are one group per child, or one for all, with the fewest tokens.
        """
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
