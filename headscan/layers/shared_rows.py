"""Sequences that begin alike, laid out as one row: what they begin with stands there once.

Shapes: N tokens of a row, P of the prefix, R endings, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscan.errors import InterventionError


@dataclass(frozen=True)
class SharedRow:
    """A row: tokens that sequences begin with, then what comes after them in each.

    Attributes:
        prefix: Token ids, at least one.
        endings: Token ids of each sequence's ending, at least one.

    Raises:
        InterventionError: One of them is empty.
    """

    prefix: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.endings or not all(self.endings):
            raise InterventionError("a shared row needs a prefix and endings, of one token or more each")

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.endings))

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Arguments of a forward pass: ``input_ids`` (1, N), and where each stands in its sequence."""
        past = len(self.prefix)
        ids = [*self.prefix, *(token for ending in self.endings for token in ending)]
        positions = [*range(past), *(past + step for ending in self.endings for step in range(len(ending)))]
        return {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
        }

    @property
    def starts(self) -> list[int]:
        """Where each ending begins in the row."""
        ends = torch.tensor([len(self.prefix), *map(len, self.endings)]).cumsum(0)
        return [int(end) for end in ends[:-1]]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    @cached_property
    def places(self) -> Tensor:
        """Where the endings' tokens stand in the row (R, T), the last one's repeated behind an ending."""
        step = torch.arange(int(self.lengths.max())).expand(len(self.endings), -1)
        return torch.tensor(self.starts)[:, None] + step.minimum(self.lengths[:, None] - 1)

    @cached_property
    def sequence_of(self) -> Tensor:
        """Which ending each token after the prefix belongs to: (N - P,)."""
        return torch.arange(len(self.endings)).repeat_interleave(self.lengths)

    def subset(self, chosen: Sequence[int]) -> tuple[SharedRow, Tensor]:
        """The row of some of the endings, and where its tokens stand in this row."""
        kept = torch.isin(self.sequence_of, torch.tensor(chosen)).nonzero()[:, 0] + len(self.prefix)
        part = SharedRow(self.prefix, tuple(self.endings[index] for index in sorted(chosen)))
        return part, torch.cat([torch.arange(len(self.prefix)), kept])
