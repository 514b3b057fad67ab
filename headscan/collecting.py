"""Measuring: one forward pass over a padded batch gives every statistic of every head.

Shapes: B sequences, N tokens (padded on the right), L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches

import torch
from torch import Tensor

from headscan.catalog import STATISTICS
from headscan.discovery import forward_kwargs
from headscan.doors import attention_door, output_door
from headscan.errors import NotFiniteError, SequenceError, UnknownNameError
from headscan.grid import AttentionSite
from headscan.loading import LoadedModel
from headscan.outputs import OUTPUT_STATISTICS, output_statistics, projection_gram
from headscan.weights import VALUE_STATISTICS, WEIGHT_STATISTICS, AttentionSummary, MassWidths, per_query_needs

#: Undefined for a sequence of one token, where they are NaN.
_NEED_TWO_TOKENS = {"previous_token_weight", "relative_entropy"}


def collect(
    lm: LoadedModel,
    input_ids: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    statistics: Iterable[str] | None = None,
    widths: MassWidths | None = None,
    path: str = "auto",
) -> dict[str, Tensor]:
    """Measure every attention head on a batch of sequences.

    Args:
        lm: A model from `headscan.load`.
        input_ids: Token ids (B, N), padded on the right with any id.
        lengths: Real tokens of each sequence (B,); None: all N.
        statistics: Names from the catalogue; None: all.
        widths: Widths of sink and recent mass.
        path: ``auto``, ``fused`` or ``blockwise`` attention; the numbers agree.

    Returns:
        For each statistic float32 (B, L, H) on the CPU; NaN where a layer has fewer heads or none.

    Raises:
        SequenceError: Ids or lengths that cannot be measured.
        UnknownNameError: A statistic that the catalogue lacks.
        NotFiniteError: A statistic came out as NaN or infinite.
    """
    wanted = check_statistics(statistics)
    input_ids, lengths = check_batch(lm, input_ids, lengths)
    collector = _Collector(lm, lengths, wanted, widths or MassWidths(), path)
    with torch.no_grad(), ExitStack() as doors:
        if wanted - OUTPUT_STATISTICS:
            doors.enter_context(attention_door(lm, collector))
        if wanted & OUTPUT_STATISTICS:
            doors.enter_context(output_door(lm, collector.visited))
        lm.model(input_ids=input_ids, **forward_kwargs(lm.model))
    return collector.stacked()


def check_statistics(names: Iterable[str] | None) -> frozenset[str]:
    """The named statistics, or all of them.

    Raises:
        UnknownNameError: The catalogue lacks one.
    """
    wanted = frozenset(STATISTICS if names is None else names)
    for name in sorted(wanted - STATISTICS.keys()):
        near = get_close_matches(name, STATISTICS, n=3, cutoff=0.4) or STATISTICS
        raise UnknownNameError(f"unknown statistic {name!r}; did you mean {', '.join(near)}?")
    return wanted


def check_batch(lm: LoadedModel, input_ids: Tensor, lengths: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Ids and lengths on the model's input device.

    Raises:
        SequenceError: Wrong shapes, a length out of range, an id outside the vocabulary, more tokens than positions.
    """
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise SequenceError(
            f"input_ids have shape {tuple(input_ids.shape)}: give (sequences, tokens), neither of them 0"
        )
    B, N = input_ids.shape
    lengths = torch.full((B,), N) if lengths is None else torch.as_tensor(lengths)
    if lengths.shape != (B,) or lengths.is_floating_point():
        raise SequenceError(f"lengths have shape {tuple(lengths.shape)}: give {B} whole numbers, one a sequence")
    if int(lengths.min()) < 1 or int(lengths.max()) > N:
        raise SequenceError(f"lengths run from {int(lengths.min())} to {int(lengths.max())}: the batch allows 1 to {N}")
    if lm.max_tokens is not None and lm.max_tokens < N:
        raise SequenceError(
            f"{N} tokens are more than the {lm.max_tokens} positions of {lm.source}: shorten the sequences"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= lm.vocab_size:
        raise SequenceError(f"token ids run to {int(input_ids.max())}: {lm.source} knows 0 to {lm.vocab_size - 1}")
    return input_ids.to(lm.device), lengths.to(lm.device)


class _Collector:
    """Gathers the numbers of all layers of one forward pass."""

    def __init__(self, lm: LoadedModel, lengths: Tensor, wanted: frozenset[str], widths: MassWidths, path: str) -> None:
        self.lm, self.lengths, self.wanted = lm, lengths, wanted
        self.needs = per_query_needs(wanted)
        self.value_norms = bool(wanted & VALUE_STATISTICS)
        self.widths, self.path = widths, path
        self.measured: dict[tuple[str, int], Tensor] = {}

    def attended(self, site: AttentionSite, summary: AttentionSummary) -> None:
        wanted = self.wanted & (WEIGHT_STATISTICS | VALUE_STATISTICS)
        self._keep(site, summary.reduce(wanted, self._lengths_on(summary.device)))

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> None:
        gram = None
        if "projected_output_norm" in self.wanted:
            gram = projection_gram(self.lm.module(site.output_projection), site).to(heads_BNHD.device)
        wanted = self.wanted & OUTPUT_STATISTICS
        self._keep(site, output_statistics(heads_BNHD, self._lengths_on(heads_BNHD.device), wanted, gram))

    def stacked(self) -> dict[str, Tensor]:
        """All numbers as (B, L, H)."""
        layers, heads = self.lm.grid.shape
        shape = (len(self.lengths), layers, heads)
        stacked = {name: torch.full(shape, float("nan")) for name in self.wanted}
        for (name, layer), values_BH in self.measured.items():
            stacked[name][:, layer, : values_BH.shape[1]] = values_BH.cpu()
        return {name: stacked[name] for name in STATISTICS if name in stacked}

    def _lengths_on(self, device: torch.device) -> Tensor:
        return self.lengths.to(device)

    def _keep(self, site: AttentionSite, reduced: dict[str, Tensor]) -> None:
        for name, values_BH in reduced.items():
            finite = values_BH.isfinite().all(1)
            if name in _NEED_TWO_TOKENS:
                finite |= self._lengths_on(finite.device) < 2
            if not finite.all():
                sequence = int((~finite).nonzero()[0])
                raise NotFiniteError(f"{name} is not finite in layer {site.layer}, sequence {sequence} of the batch")
            self.measured[name, site.layer] = values_BH.float()
