"""Common prefixes of sequences, each of which is read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass
class PrefixNode:
    """Prefixes of one length that continue one shorter prefix, or start at the first token.

    Attributes:
        start: Number of tokens before these.
        tokens: The tokens of each prefix; empty in the root, where no prefix is read.
        sequences: Indices of the sequences that continue from here alone, each with the index of its prefix.
        children: Longer prefixes; a node has them only if it holds a single prefix.
    """

    start: int
    tokens: list[tuple[int, ...]]
    sequences: list[tuple[int, int]] = field(default_factory=list)
    children: list[PrefixNode] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + (len(self.tokens[0]) if self.tokens else 0)


def prefix_tree(sequences: Sequence[tuple[int, ...]], shareable: Sequence[int], pass_cost: int) -> PrefixNode:
    """Return the tree of prefixes to read once, with one prefix in each node.

    Args:
        shareable: Number of leading tokens of each sequence that may be shared.
        pass_cost: Cost of one more forward pass, in tokens; a prefix is shared if that saves more.
    """
    # Sort by the shareable tokens only, so that a sequence with fewer of them never separates two that share more.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i][: shareable[i]])
    common = [0, *(common_tokens(sequences, shareable, a, b) for a, b in pairwise(order))]
    root = PrefixNode(0, [])
    # Ranges of the sorted sequences, and the node that they continue from.
    ranges = [(0, len(order), root)] if order else []
    while ranges:
        low, high, node = ranges.pop()
        if high - low == 1:
            node.sequences.append((order[low], 0))
            continue
        shared = min(common[low + 1 : high])
        if (high - low - 1) * (shared - node.end) > pass_cost:
            child = PrefixNode(node.end, [sequences[order[low]][node.end : shared]])
            node.children.append(child)
            node = child
        cuts = [low, *(i for i in range(low + 1, high) if common[i] == shared), high]
        ranges += [(a, b, node) for a, b in pairwise(cuts)]
    return root


def common_tokens(sequences: Sequence[tuple[int, ...]], shareable: Sequence[int], a: int, b: int) -> int:
    """Return the number of leading tokens that the sequences ``a`` and ``b`` have in common and may share."""
    most = min(shareable[a], shareable[b])
    differing = np.flatnonzero(np.array(sequences[a][:most]) != np.array(sequences[b][:most]))
    return int(differing[0]) if len(differing) else most


def tokens_read_once(sequences: Iterable[tuple[int, ...]]) -> int:
    """Return the tokens of sequences, if every common prefix is read once."""
    ordered = sorted(sequences)
    sizes = [len(sequence) for sequence in ordered]
    return sum(sizes) - sum(common_tokens(ordered, sizes, a, b) for a, b in pairwise(range(len(ordered))))


def join_similar(root: PrefixNode, pass_cost: int, most_tokens: int) -> None:
    """Join similar prefixes of different sequences in nodes of at most ``most_tokens`` tokens.

    A short pass takes little less time than one of many sequences, so a prefix is cut if that costs less than one more
    pass (``pass_cost``, in tokens). The prefixes of a node are cut to one length, so that no padding comes between a
    prefix and its continuation.
    """
    nodes = [root]
    while nodes:
        node = nodes.pop()
        leaves = [child for child in node.children if not child.children]
        inner = [child for child in node.children if child.children]
        node.children = [*inner, *map(_joined, _similar(leaves, pass_cost, most_tokens))]
        nodes += inner


def _joined(nodes: list[PrefixNode]) -> PrefixNode:
    width = min(len(node.tokens[0]) for node in nodes)
    sequences = [(sequence, prefix) for prefix, node in enumerate(nodes) for sequence, _ in node.sequences]
    return PrefixNode(nodes[0].start, [node.tokens[0][:width] for node in nodes], sequences)


def _similar(leaves: list[PrefixNode], pass_cost: int, most_tokens: int) -> Iterator[list[PrefixNode]]:
    """Yield groups of prefixes, longest first, that are worth one pass."""
    group: list[PrefixNode] = []
    for leaf in sorted(leaves, key=lambda leaf: -leaf.end):
        # Tokens that are cut off are read by every sequence instead of once.
        read_again = sum((len(node.sequences) - 1) * (node.end - leaf.end) for node in group)
        if group and (read_again > pass_cost * len(group) or (len(group) + 1) * leaf.end > most_tokens):
            yield group
            group = []
        group.append(leaf)
    if group:
        yield group
