"""Common prefixes of token sequences that are worth reading once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass
class PrefixNode:
    """Tokens that several sequences have in common after a shorter common prefix.

    Attributes:
        start: Number of tokens before these.
        tokens: The common tokens; empty in the root.
        children: Longer prefixes that continue from here.
        rows: Sequences that continue from here alone.
    """

    start: int
    tokens: tuple[int, ...]
    children: list[PrefixNode] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number of tokens of the prefix, up to and including these."""
        return self.start + len(self.tokens)


def prefix_tree(sequences: Sequence[tuple[int, ...]], shareable: Sequence[int], pass_cost: int) -> PrefixNode:
    """Return the tree of prefixes to read once.

    Args:
        sequences: Token ids.
        shareable: Number of leading tokens of each sequence that may be shared.
        pass_cost: Cost of one more forward pass, in tokens; a prefix is shared if that saves more.
    """
    # Sort by the shareable tokens only, so that a sequence with fewer of them never separates two that share more.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i][: shareable[i]])
    common = [0, *(common_tokens(sequences, shareable, a, b) for a, b in pairwise(order))]
    root = PrefixNode(0, ())
    # Ranges of the sorted sequences, and the node that they continue from.
    todo = [(0, len(order), root)] if order else []
    while todo:
        low, high, node = todo.pop()
        if high - low == 1:
            node.rows.append(order[low])
            continue
        shared = min(common[low + 1 : high])
        if (high - low - 1) * (shared - node.end) > pass_cost:
            child = PrefixNode(node.end, sequences[order[low]][node.end : shared])
            node.children.append(child)
            node = child
        cuts = [low, *(i for i in range(low + 1, high) if common[i] == shared), high]
        todo += [(a, b, node) for a, b in pairwise(cuts)]
    return root


def common_tokens(sequences: Sequence[tuple[int, ...]], shareable: Sequence[int], a: int, b: int) -> int:
    """Return the number of leading tokens that two sequences share."""
    most = min(shareable[a], shareable[b])
    differ = np.flatnonzero(np.array(sequences[a][:most]) != np.array(sequences[b][:most]))
    return int(differ[0]) if len(differ) else most
