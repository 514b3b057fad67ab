"""Hooks of a pass over a shared row.

Each ending attends to the prefix and to itself, and heads are ablated.

Shapes: N tokens of a row, P of the prefix, R endings, T tokens of the longest; H query heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.ablation.replacements import Filler
from headscan.ablation.rule_statistics import RuleStatistics
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.layers.shared_rows import SharedRow
from headscan.measure.scores import score
from headscan.models.loaded_model import LoadedModel

#: Statistics that are not a mean over tokens.
_OF_FIRST, _OF_LAST = frozenset({"first_value_norm"}), frozenset({"last_output_norm"})


class RowSplit(Exception):
    """Raised when ablated heads differ between sequences of a shared row.

    Attributes:
        layer: The layer.
        ablated: Ablated heads of the layer, bool (R, H).
    """

    def __init__(self, layer: int, ablated: Tensor) -> None:
        super().__init__(f"in layer {layer}")
        self.layer, self.ablated = layer, ablated


class SharedRowHooks:
    """Attention and ablation in one pass over a shared row.

    Args:
        ablated: An ablation for each sequence; all that use a score use the same one.

    Attributes:
        zeroed: Number of ablated heads, the same ones in all sequences.
    """

    def __init__(self, lm: LoadedModel, ablated: Sequence[Ablation], row: SharedRow) -> None:
        self.zeroed = 0
        self._row = row
        rows: dict[Ablation, list[int]] = {}
        for row_number, each in enumerate(ablated):
            rows.setdefault(each, []).append(row_number)
        # A slice where all agree: an index list would be copied to the GPU in every layer.
        alike = len(rows) == 1
        self._rows = {each: slice(None) if alike else torch.tensor(numbers) for each, numbers in rows.items()}
        scores = sorted({each.score_name for each in ablated if each.score_name is not None})
        if len(scores) > 1:
            raise InterventionError(
                f"scores of the rules in a shared row: {', '.join(scores)} (limit 1). Use one score"
            )
        for each in rows:
            each.check_values(lm.grid)
        replacements = {each.replaces_by for each in ablated}
        if len(replacements) > 1:
            raise InterventionError(
                f"values of ablated heads in a shared row: {', '.join(sorted(each.value for each in replacements))} "
                "(limit 1). Use one value"
            )
        (replacement,) = replacements
        self._fill = Filler(replacement, InterventionRecord(lm, None))
        self._score = scores[0] if scores else None
        self._prefix, self._endings = RuleStatistics(lm, self._score), RuleStatistics(lm, self._score)
        self._layouts: dict[torch.device, _Layout] = {}

    def attended(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall) or call.bias is not None:
            raise UnsupportedModelError("attention with a position bias cannot run in shared rows. Run whole sequences")
        past, here = len(self._row.prefix), self._layout(call.device)
        out = self._prefix.attended(_as_sequences(call, here.first, 0), here.past)
        outs = self._endings.attended(_as_sequences(call, here.places, past), here.lengths, past)
        return torch.cat([out, outs.transpose(1, 2)[here.ending, here.step].transpose(0, 1)[None]], 2)

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        ablated_RH = self._chosen(site, heads_BNHD)
        if not bool((ablated_RH == ablated_RH[0]).all()):
            raise RowSplit(site.layer, ablated_RH)
        zeroed = int(ablated_RH[0].sum())
        self.zeroed += zeroed
        if not zeroed:
            return heads_BNHD
        return self._fill(site, heads_BNHD, ablated_RH[0])

    def _chosen(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        """Return the ablated heads of each sequence, bool (R, H), on the CPU."""
        scores_RH = None if self._score is None else self._scores(self._score, site, heads_BNHD)
        ablated_RH = torch.zeros(len(self._row.endings), site.num_attention_heads, dtype=torch.bool)
        for each, rows in self._rows.items():
            ablated_RH[rows] = each.heads_at(site, None if scores_RH is None else scores_RH[rows]).cpu()
        return ablated_RH

    def _scores(self, name: str, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        past, here = len(self._row.prefix), self._layout(heads_BNHD.device)
        before = self._prefix.visited(site, heads_BNHD[:, :past], here.past)
        after = self._endings.visited(site, heads_BNHD[0, here.places], here.lengths)
        return score(_joined(before, past, after, here.lengths), name)

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._layouts:
            self._layouts[device] = _Layout.of(self._row, device)
        return self._layouts[device]


class _Layout(NamedTuple):
    """Token positions of a row's sequences, copied to a device once.

    Attributes:
        first: Indices of the prefix (1, P).
        past: Its length (1,).
        places, lengths: `SharedRow.places` and `SharedRow.lengths`.
        ending, step: Indices into ``places`` of the row's tokens after the prefix (N - P,).
    """

    first: Tensor
    past: Tensor
    places: Tensor
    lengths: Tensor
    ending: Tensor
    step: Tensor

    @classmethod
    def of(cls, row: SharedRow, device: torch.device) -> _Layout:
        past, places, lengths = len(row.prefix), row.places, row.lengths
        real = torch.arange(places.shape[1]) < lengths[:, None]
        # Indices instead of a mask: with a mask every layer would wait for the GPU to count its elements.
        ending, step = real.nonzero(as_tuple=True)
        parts = (torch.arange(past)[None], torch.tensor([past]), places, lengths, ending, step)
        return cls(*(part.to(device) for part in parts))


def _as_sequences(call: ScoredCall, places_RT: Tensor, past: int) -> ScoredCall:
    """Return the queries at ``places`` as separate sequences.

    Each follows the row's first ``past`` keys.

    The model's mask is dropped, since it treats the row as one sequence. Causality and window replace it.
    """

    def chosen(x_1HND: Tensor) -> Tensor:
        return x_1HND[0][:, places_RT].transpose(0, 1)

    def behind(x_1KSD: Tensor) -> Tensor:
        return torch.cat([x_1KSD[:, :, :past].expand(len(places_RT), -1, -1, -1), chosen(x_1KSD)], 2)

    sinks = call.sinks_BHN
    return replace(
        call,
        query_BHND=chosen(call.query_BHND),
        key_BKSD=behind(call.key_BKSD),
        value_BKSD=behind(call.value_BKSD),
        causal=True,
        mask=None,
        window=call.sliding_window,
        sinks_BHN=sinks if sinks is None or sinks.shape[2] == 1 else chosen(sinks),
    )


def _joined(before: Mapping[str, Tensor], past: int, after: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Return statistics of whole sequences from those of their parts.

    The parts are the prefix (1, H) and the endings (R, H).
    """
    share = (past / (past + lengths.double()))[:, None]
    joined = {}
    for name, values in after.items():
        if name in _OF_LAST:
            joined[name] = values
        elif name in _OF_FIRST:
            joined[name] = before[name].expand_as(values)
        else:
            joined[name] = (share * before[name].double() + (1.0 - share) * values.double()).float()
    return joined
