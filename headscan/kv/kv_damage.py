"""Damage of windows: how much loss each KV head causes if it alone keeps only a window of its keys.

``kv_damage`` estimates it for all KV heads at once. Each KV head outputs ``gate * full + (1 - gate) * window``, and the
negated derivative of the loss with respect to the gate, taken with all gates at 0.5, ranks the KV heads as removing
them one by one does. At 1, where the model was trained to a stationary point, the derivative is no guide on ordinary
text.

Shapes: B sequences, N tokens, L layers, K KV heads of the widest layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.errors import NotFiniteError, PlanMismatchError, SequenceError
from headscan.grid import HeadGrid
from headscan.kv.gate_gradients import gate_gradients
from headscan.kv.kept_keys import Window
from headscan.measure.collect import check_ids
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import batches, run_halving
from headscan.sizing.window_candidates import KvHead, window_candidates

_log = logging.getLogger("headscan")

#: Tokens of one pass, padding included, and the largest number on devices where more are slower.
BATCH_TOKENS = 8192
_PASS_TOKENS = {"cpu": 2048}


@dataclass(frozen=True)
class KvDamage:
    """Loss increase by sequence and KV head, in nats per scored token.

    Attributes:
        by_sequence_BLK: float32; NaN where a layer lacks the KV head or cannot keep a window, and for sequences that
            are not longer than the window.
    """

    by_sequence_BLK: Tensor

    @property
    def sequences(self) -> int:
        """Number of sequences that are longer than the window."""
        return int((~self.by_sequence_BLK.isnan()).flatten(1).any(1).sum())

    @property
    def mean_LK(self) -> Tensor:
        """Mean over the sequences."""
        return self.by_sequence_BLK.nanmean(0)

    @property
    def standard_error_LK(self) -> Tensor:
        """Standard error of the mean; NaN for a single sequence."""
        used = self.by_sequence_BLK[(~self.by_sequence_BLK.isnan()).flatten(1).any(1)]
        return used.std(0) / math.sqrt(max(len(used), 1))


def kv_damage(
    lm: LoadedModel,
    ids: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    sink: int = 4,
    recent: int = 256,
    *,
    gates: Sequence[float] = (0.5,),
    scored: Sequence[int] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Return the mean of `kv_damages` over the sequences: float32 (L, K), in nats per scored token."""
    return kv_damages(lm, ids, lengths, sink, recent, gates=gates, scored=scored, batch_tokens=batch_tokens).mean_LK


def kv_damages(
    lm: LoadedModel,
    ids: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    sink: int = 4,
    recent: int = 256,
    *,
    gates: Sequence[float] = (0.5,),
    scored: Sequence[int] | None = None,
    heads: Sequence[KvHead] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> KvDamage:
    """Estimate, for all KV heads at once, the loss increase if one KV head keeps only a window.

    Memory is linear in the length, except for models with soft caps, position biases or learned sinks.

    Args:
        lm: A decoder from `headscan.load`, with all its layers.
        ids: Token ids (B, N), padded on the right with any id.
        lengths: Real tokens of each sequence (B,); None means all N.
        sink: Number of first tokens in the window.
        recent: Number of last tokens in the window, the query's own included.
        gates: Values at which the derivative is taken, 0 to 1; the damage is their mean. Text needs 0.5; prompts whose
            answer lies far back are ranked well by any value.
        scored: Number of scored tokens of each sequence, its last ones; None scores all but the first.
        heads: KV heads to return; None returns all that can keep a window. All of them have gates either way, so the
            choice changes no number.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        SequenceError: Invalid ids, lengths or scored tokens, or no sequence is longer than the window.
        PlanMismatchError: ``sink``, ``recent`` or a gate is out of range, or one of ``heads`` cannot keep a window.
        NotFiniteError: A damage is NaN or infinite.
        UnsupportedModelError: No KV head can keep a window, or the model computes its own attention weights.
    """
    window = checked_window(sink, recent)
    if not gates or not all(0 <= gate <= 1 for gate in gates):
        raise PlanMismatchError(f"gates={tuple(gates)} (limit 0 to 1, at least one). Change them")
    candidates = window_candidates(lm)
    places = candidates if heads is None else tuple(heads)
    unknown = sorted(set(places) - set(candidates))
    if unknown:
        raise PlanMismatchError(f"damage of (layer, KV head) {unknown[0]}: it cannot keep a window. Leave it out")
    columns = [candidates.index(place) for place in places]
    sequences = _Sequences.check(lm, ids, lengths, scored)

    def measure(part: _Sequences) -> Tensor:
        found = [
            -gate_gradients(lm, part.ids, part.lengths, window, candidates, gate=gate, scored=part.scored)
            for gate in gates
        ]
        return torch.stack(found).mean(0)[:, columns]

    measured = sequences.measured(lm, window, batch_tokens, measure)
    finite = torch.stack(list(measured.values())).isfinite()
    if not finite.all():
        wrong = int((~finite).sum())
        raise NotFiniteError(f"NaN or infinite damages: {wrong} of {finite.numel()} (limit 0). Use another `dtype`")
    return KvDamage(sequences.table(lm.grid, places, measured))


def checked_window(sink: int, recent: int) -> Window:
    """Return the window.

    Raises:
        PlanMismatchError: A width is out of range.
    """
    if recent < 1 or sink < 0:
        raise PlanMismatchError(f"window of sink={sink}, recent={recent} (limit sink 0, recent 1). Widen it")
    return Window(sink, recent)


@dataclass(frozen=True)
class _Sequences:
    """Checked sequences on the model's input device."""

    ids: Tensor
    lengths: tuple[int, ...]
    scored: tuple[int, ...] | None

    @classmethod
    def check(
        cls, lm: LoadedModel, ids: Tensor, lengths: Tensor | Sequence[int] | None, scored: Sequence[int] | None
    ) -> _Sequences:
        ids, lengths = check_ids(lm, ids, lengths)
        if scored is not None and len(scored) != len(ids):
            raise SequenceError(f"scored has {len(scored)} entries (limit {len(ids)} sequences). Give one for each")
        return cls(ids, tuple(lengths.tolist()), None if scored is None else tuple(map(int, scored)))

    def rows(self, rows: Sequence[int]) -> _Sequences:
        lengths = tuple(self.lengths[row] for row in rows)
        scored = None if self.scored is None else tuple(self.scored[row] for row in rows)
        return _Sequences(self.ids[list(rows), : max(lengths)], lengths, scored)

    def measured(
        self, lm: LoadedModel, window: Window, batch_tokens: int, measure: Callable[[_Sequences], Tensor]
    ) -> dict[int, Tensor]:
        """Return the numbers (heads,) of each sequence that is longer than the window, by row.

        Raises:
            SequenceError: None is.
            MemoryLimitError: One sequence does not fit into memory.
        """
        long = [row for row, length in enumerate(self.lengths) if length > window.width]
        if not long:
            raise SequenceError(
                f"the longest sequence has {max(self.lengths)} tokens (at least {window.width + 1}, one more than the "
                "window). Give longer sequences, or lower `recent`"
            )
        if len(long) < len(self.lengths):
            _log.warning(
                "%d of %d sequences are not longer than the window of %d tokens and are left out",
                len(self.lengths) - len(long),
                len(self.lengths),
                window.width,
            )
        batch_tokens = min(batch_tokens, _PASS_TOKENS.get(lm.device.type, batch_tokens))
        long_lengths = [self.lengths[row] for row in long]
        groups = [lm.rope_lengths.group(length) for length in long_lengths]
        found: dict[int, Tensor] = {}
        for batch in batches(long_lengths, batch_tokens, groups=groups):
            rows = [long[index] for index in batch]
            for part, values in run_halving(
                rows, lambda part: measure(self.rows(part)), self.lengths, lm.limits["kv_damage"]
            ):
                found.update(zip(part, values, strict=True))
        return found

    def table(self, grid: HeadGrid, heads: Sequence[KvHead], found: dict[int, Tensor]) -> Tensor:
        """Return numbers by sequence, layer and KV head: float32 (B, L, K), NaN where there are none."""
        widest = max(site.num_key_value_heads for site in grid.sites)
        table = torch.full((len(self.lengths), grid.num_layers, widest), float("nan"))
        layers, kv_heads = [layer for layer, _ in heads], [kv_head for _, kv_head in heads]
        for row, values in found.items():
            table[row, layers, kv_heads] = values
        return table
