"""Passes over shared rows with ablated heads.

Only attention mixes tokens, so a row of a prefix and several endings runs through everything else unchanged; the
attention hook lets each ending attend to the prefix and itself. Masks are known before the pass. A rule needs
statistics of whole sequences: those of the prefix are joined with those of each ending, which is exact for causal
attention and means over tokens. Sequences share the row while their ablated heads agree. In the first layer in which
they differ the pass stops, and each group of sequences resumes at that layer in a row of its own.

Shapes: N tokens of a row, R endings; E width of a hidden state, H query heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule
from headscan.attention.hooks import attention_hook, output_hook
from headscan.attention.interface import IMPLEMENTATION
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.layer_range_pass import resuming_at
from headscan.layers.prefix_cache import nearly_equal, shares_prefixes
from headscan.layers.resume_check import cannot_resume
from headscan.layers.shared_row_hooks import RowSplit, SharedRowHooks
from headscan.layers.shared_rows import SharedRow
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel

#: Tokens of the row that checks a model.
_TRIED_PREFIX, _TRIED_ENDING = 9, 5


class SharedRowReading(NamedTuple):
    """The result of some sequences of a shared row.

    Attributes:
        sequences: Their indices.
        zeroed_share: Share of all heads that are ablated in each sequence.
        value: The result of ``forward``.
    """

    sequences: list[int]
    zeroed_share: float
    value: Any


def read_shared_row(
    blocks: Blocks,
    ablated: Ablation | Sequence[Ablation],
    row: SharedRow,
    forward: Callable[[SharedRow, list[int]], Any],
) -> Iterator[SharedRowReading]:
    """Read the sequences of a shared row with heads ablated.

    Args:
        blocks: The blocks of a model that `can_share_rows`.
        ablated: One ablation for all sequences, or one for each of them.
        row: The row.
        forward: Runs a forward pass over `SharedRow.inputs`, without a KV cache. It takes the row and the indices of
            its sequences, and is called again for subsets of them if the ablated heads differ.

    Yields:
        Results that contain every sequence once.

    Raises:
        HeadIndexError: The model has no such head.
        InterventionError: The numbers of ablations and sequences differ.
        SequenceError: The sequences need different rotary frequencies.
    """
    lm = blocks.lm
    lengths = (len(row.prefix) + row.lengths).tolist()
    lm.rope_lengths.check(max(lengths), lengths)
    ablations = [ablated] * len(row.endings) if isinstance(ablated, Ablation) else list(ablated)
    if len(ablations) != len(row.endings):
        raise InterventionError(f"{len(ablations)} ablations for {len(row.endings)} sequences. Pass one for each")
    for each in set(ablations):
        lm.grid.check(each.fixed_heads or ())
    heads = lm.grid.total_heads
    branches = [_Branch(list(range(len(row.endings))), row, 0, None, 0)]
    while branches:
        branch = branches.pop()
        here = [ablations[index] for index in branch.sequences]
        visitor = SharedRowHooks(lm, here, branch.row)
        inputs: dict[str, Tensor] = {}

        def keep(hidden: Tensor, _: object, inputs: dict[str, Tensor] = inputs) -> None:
            inputs["last"] = hidden

        with ExitStack() as hooks:
            if branch.hidden is not None:
                hooks.enter_context(resuming_at(blocks, branch.layer, branch.hidden))
            for block in blocks.all[branch.layer :]:
                hooks.enter_context(block.watched(keep))
            hooks.enter_context(attention_hook(lm, visitor.attended))
            hooks.enter_context(output_hook(lm, visitor.visited))
            try:
                value = forward(branch.row, branch.sequences)
            except RowSplit as split:
                branches += branch.split(split, inputs["last"], branch.zeroed + visitor.zeroed)
                continue
        yield SharedRowReading(branch.sequences, (branch.zeroed + visitor.zeroed) / heads, value)


@torch.no_grad()
def can_share_rows(lm: LoadedModel) -> bool:
    """Return True if shared rows reproduce the hidden states of whole sequences.

    The attention interface must receive queries, keys and windows, passes must resume at each block, and only attention
    may mix tokens. The last is checked on a short row whose sequences differ in their ablated heads.

    Raises:
        RuntimeError: A pass ran out of memory.
    """
    grid = lm.grid
    shown = all(site.by_interface and site.causal for site in grid.sites) and grid.implementation == IMPLEMENTATION
    if not shown or not shares_prefixes(lm) or "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return False
    try:
        blocks = find_blocks(lm)
        # A mask of one middle head in one of two sequences. A rule would depend on rounding if its threshold were close
        # to a score.
        middle = grid.sites[len(grid.sites) // 2].layer
        parted = (HeadMask([]), HeadMask([(middle, 0)]))
        return (
            not cannot_resume(blocks)
            and _shared_rows_are_exact(blocks, (_IDLE, _IDLE))
            and _shared_rows_are_exact(blocks, parted)
        )
    except UnsupportedModelError:
        return False


#: A rule that ablates nothing but measures attention weights.
_IDLE = HeadRule("entropy_ln", -1.0)


def _shared_rows_are_exact(blocks: Blocks, ablated: tuple[Ablation, Ablation]) -> bool:
    lm = blocks.lm
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(lm.vocab_size, 1000), (_TRIED_PREFIX + 2 * _TRIED_ENDING,), generator=generator).tolist()
    first, second = _TRIED_PREFIX, _TRIED_PREFIX + _TRIED_ENDING
    row = SharedRow(tuple(ids[:first]), (tuple(ids[first:second]), tuple(ids[second:])))

    def hidden(row: SharedRow, _: object) -> Tensor:
        found: Tensor = run(lm.model, row.inputs(lm.device))[0]
        return found[0]

    for reading in read_shared_row(blocks, ablated, row, hidden):
        part, _ = row.subset(reading.sequences)
        for index, ending, start in zip(reading.sequences, part.endings, part.starts, strict=True):
            whole_ids = torch.tensor([[*row.prefix, *ending]], device=lm.device)
            with intervene(lm, ablated[index]):
                whole: Tensor = run(lm.model, {"input_ids": whole_ids})[0][0, len(row.prefix) :]
            if not nearly_equal(reading.value[start : start + len(ending)], whole):
                return False
    return True


@dataclass(frozen=True)
class _Branch:
    """Sequences that share a row from a layer on.

    Attributes:
        sequences: Their indices.
        hidden: Input of the layer (1, N, E); None starts at the embedding.
        zeroed: Number of ablated heads in the layers below.
    """

    sequences: list[int]
    row: SharedRow
    layer: int
    hidden: Tensor | None
    zeroed: int

    def split(self, split: RowSplit, hidden: Tensor, zeroed: int) -> list[_Branch]:
        """Return the branches that continue where the ablated heads differ."""
        groups: dict[bytes, list[int]] = {}
        for index, ablated in enumerate(split.ablated):
            groups.setdefault(ablated.numpy().tobytes(), []).append(index)
        found = []
        for group in groups.values():
            row, places = self.row.subset(group)
            own = hidden[:, places.to(hidden.device)]
            found.append(_Branch([self.sequences[index] for index in group], row, split.layer, own, zeroed))
        return found
