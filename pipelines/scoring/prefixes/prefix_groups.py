"""Prefixes of one length, read as the sequences of one batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headscan.pipelines.scoring.prefixes.prefix_tree import PrefixNode


@dataclass(frozen=True)
class PrefixGroup:
    """Prefixes that continue one shorter prefix, or start at the first token.

    Attributes:
        start: Number of tokens before these.
        tokens: The tokens of each prefix, equally many; empty in the root, where no prefix is read.
        rows: Sequences that continue from here, each with the index of its prefix.
        children: Longer prefixes, which continue from the only one of this group.
    """

    start: int
    tokens: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, int], ...]
    children: tuple[PrefixGroup, ...] = ()

    @property
    def end(self) -> int:
        """Number of tokens of a prefix, up to and including these."""
        return self.start + (len(self.tokens[0]) if self.tokens else 0)


def group_prefixes(root: PrefixNode, pass_cost: int, most_tokens: int) -> PrefixGroup:
    """Return the tree with similar prefixes of different sequences in groups.

    A short pass takes little less time than one of many sequences. The prefixes of a group are cut to one length, so
    no padding comes between a prefix and its continuation.

    Args:
        root: The tree of prefixes.
        pass_cost: Cost of one more forward pass, in tokens; a prefix is cut if that costs less.
        most_tokens: Most tokens of the prefixes of a group.
    """
    leaves = [child for child in root.children if not child.children]
    inner = [_group([child], pass_cost, most_tokens) for child in root.children if child.children]
    groups = [_group(nodes, pass_cost, most_tokens) for nodes in _similar(leaves, pass_cost, most_tokens)]
    return PrefixGroup(root.start, (root.tokens,) if root.tokens else (), _rows([root]), (*inner, *groups))


def _group(nodes: list[PrefixNode], pass_cost: int, most_tokens: int) -> PrefixGroup:
    if len(nodes) == 1:
        return group_prefixes(nodes[0], pass_cost, most_tokens)
    width = min(len(node.tokens) for node in nodes)
    return PrefixGroup(nodes[0].start, tuple(node.tokens[:width] for node in nodes), _rows(nodes))


def _rows(nodes: list[PrefixNode]) -> tuple[tuple[int, int], ...]:
    return tuple((row, index) for index, node in enumerate(nodes) for row in node.rows)


def _similar(leaves: list[PrefixNode], pass_cost: int, most_tokens: int) -> Iterator[list[PrefixNode]]:
    """Yield groups of prefixes, longest first, that are worth one pass."""
    group: list[PrefixNode] = []
    for leaf in sorted(leaves, key=lambda leaf: -leaf.end):
        # Tokens that are cut off are read by every sequence instead of once.
        again = sum((len(node.rows) - 1) * (node.end - leaf.end) for node in group)
        if group and (again > pass_cost * len(group) or (len(group) + 1) * leaf.end > most_tokens):
            yield group
            group = []
        group.append(leaf)
    if group:
        yield group
