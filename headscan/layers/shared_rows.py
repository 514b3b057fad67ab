"""Sequences in one row that holds their common prefix once.

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
    """A row: a common prefix, followed by each sequence's ending.

    Attributes:
        prefix: Token ids of the prefix, at least one.
        endings: Token ids of each sequence's ending, at least one.

    Raises:
        InterventionError: The prefix or an ending is empty.
    """

    prefix: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.endings or not all(self.endings):
            raise InterventionError("empty prefix or ending in a shared row. Pass one token or more of each")

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.endings))

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of a forward pass: ``input_ids`` (1, N) and ``position_ids`` (1, N)."""
        past = len(self.prefix)
        ids = [*self.prefix, *(token for ending in self.endings for token in ending)]
        positions = [*range(past), *(past + step for ending in self.endings for step in range(len(ending)))]
        return {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
        }

    @property
    def starts(self) -> list[int]:
        """Index of each ending's first token in the row."""
        ends = torch.tensor([len(self.prefix), *map(len, self.endings)]).cumsum(0)
        return [int(end) for end in ends[:-1]]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    @cached_property
    def places(self) -> Tensor:
        """Indices of the endings' tokens in the row (R, T).

        They are padded with the ending's last index.
        """
        step = torch.arange(int(self.lengths.max())).expand(len(self.endings), -1)
        return torch.tensor(self.starts)[:, None] + step.minimum(self.lengths[:, None] - 1)

    @cached_property
    def sequence_of(self) -> Tensor:
        """Index of the ending of each token after the prefix (N - P,)."""
        return torch.arange(len(self.endings)).repeat_interleave(self.lengths)

    def subset(self, chosen: Sequence[int]) -> tuple[SharedRow, Tensor]:
        """Return the row of some endings, and its tokens' indices here."""
        kept = torch.isin(self.sequence_of, torch.tensor(chosen)).nonzero()[:, 0] + len(self.prefix)
        part = SharedRow(self.prefix, tuple(self.endings[index] for index in sorted(chosen)))
        return part, torch.cat([torch.arange(len(self.prefix)), kept])
