"""Which token sequences share a row: the tokens that they begin with, once, and what comes after them in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headscan.pipelines.scoring.prefix_tree import PrefixNode

#: A row is as long as so many times its prefix at least, if it may be: reading a prefix again costs more than what
#: longer passes lose.
_PREFIXES = 3


@dataclass(frozen=True)
class Row:
    """Sequences, by their index, that share their first ``prefix`` tokens; none are shared by a sequence alone."""

    prefix: int
    members: tuple[int, ...]


def rows(root: PrefixNode, lengths: Sequence[int], best_tokens: int, most_tokens: int) -> list[Row]:
    """The rows in which all sequences of a prefix tree are read, with few tokens in all.

    Args:
        root: The tree.
        lengths: Tokens of each sequence.
        best_tokens: Tokens of a row that is read at the best pace.
        most_tokens: Tokens that no row exceeds, unless a sequence alone does.
    """
    packer = _Packer(lengths, best_tokens, most_tokens)
    return packer.below(root)


@dataclass(frozen=True)
class _Packer:
    lengths: Sequence[int]
    best_tokens: int
    most_tokens: int

    def below(self, node: PrefixNode) -> list[Row]:
        """Rows of all sequences from a node on: those that go on alike share more, or all share what they can."""
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
