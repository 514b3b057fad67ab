"""Which prefixes several token sequences have in common, and which of them are worth reading once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass
class PrefixNode:
    """Tokens that several sequences have in common from one place on.

    Attributes:
        start: How many tokens come before them.
        tokens: The common tokens; of the root none.
        children: Longer prefixes that go on from here.
        rows: Sequences that go on from here each on its own, to their end.
    """

    start: int
    tokens: tuple[int, ...]
    children: list[PrefixNode] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens up to here, these included."""
        return self.start + len(self.tokens)


def prefix_tree(sequences: Sequence[tuple[int, ...]], shareable: Sequence[int], pass_cost: int) -> PrefixNode:
    """The tree of prefixes to read once.

    Args:
        sequences: Token ids.
        shareable: How many tokens at the beginning of each may be shared.
        pass_cost: What one more forward pass costs, in tokens: a prefix is shared if that saves more.
    """
    # By what may be shared, so that a sequence of which less may be stands between no two that share more.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i][: shareable[i]])
    common = [0, *(common_tokens(sequences, shareable, a, b) for a, b in pairwise(order))]
    root = PrefixNode(0, ())
    # Ranges of the sorted sequences, and the node that they go on from.
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
    """How many tokens two sequences begin with in common, of those that may be shared."""
    most = min(shareable[a], shareable[b])
    differ = np.flatnonzero(np.array(sequences[a][:most]) != np.array(sequences[b][:most]))
    return int(differ[0]) if len(differ) else most
