"""The attention of one pass over the cache of one layer whose KV heads keep different tokens.

Shapes: B sequences, N new tokens, S tokens so far, H query heads, K KV heads, G = H / K, D and Dv widths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headscan.attention.cached_heads import PLAIN, ScoreTerms
from headscan.errors import UnsupportedModelError
from headscan.kv.full_keys import FullKeys
from headscan.kv.window_attention import grouped_attention
from headscan.kv.window_keys import WindowKeys

if TYPE_CHECKING:
    from headscan.kv.plan_layer import PlanLayer


class PlanStep:
    """The attention of the pass that added the last ``queries`` tokens to a layer.

    Attributes:
        queries: Number of newest tokens (N).
        tokens: Number of tokens that the layer has seen (S).
    """

    def __init__(self, layer: PlanLayer, queries: int, value_dim: int) -> None:
        self.queries, self.tokens = queries, layer.tokens
        self._layer, self._value_dim = layer, value_dim
        self._attended = False

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None, terms: ScoreTerms = PLAIN) -> Tensor:
        """As `GroupedAttention.attend`.

        Raises:
            UnsupportedModelError: The mask is not causal with padding on the left, or another layer reads these keys.
        """
        layer, N = self._layer, self.queries
        if self._attended or layer.tokens != self.tokens:
            raise UnsupportedModelError(
                f"the keys of {layer.name} are read twice, but windows have moved on. Keep the full cache of layers"
                " whose keys other layers read"
            )
        self._attended = True
        K = layer.kv_heads
        packed = N == 1 and query.shape[1] == K
        query_BKGND = query[:, :, :, None] if packed else query.unflatten(1, (K, -1))
        if packed and mask is not None and mask.shape[1] > 1:
            mask = mask.flatten(1, 2)[:, :, None]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        seen_BNS, bias = self._read_mask(mask, len(query))
        if bias is not None:
            terms = replace(terms, bias=bias if terms.bias is None else terms.bias + bias)
        query_BKGND, terms = layer.in_groups(query_BKGND), self._in_groups(terms)
        outs = [self._attend(heads, held, query_BKGND, scale, seen_BNS, terms) for heads, held in layer.parts]
        out = layer.in_order(outs[0] if len(outs) == 1 else torch.cat(outs, 1))
        return out[:, :, :, 0] if packed else out.flatten(1, 2)

    def _read_mask(self, mask: Tensor | None, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Return which keys are seen (B or 1, N, S) and the mask's bias, and place the rows of the windows."""
        layer, N = self._layer, self.queries
        if mask is None:
            if N > 1 or layer.last_start:
                self._place(None, 0)
            return None, None
        if mask.shape[-2:] != (N, self.tokens):
            raise UnsupportedModelError(
                f"attention mask {tuple(mask.shape)} for {N} queries and {self.tokens} keys. Pass a mask of the whole"
                " text"
            )
        # A single token moves no row, unless some rows are padding so far; its windows look up which keys it sees.
        place = N > 1 or layer.last_start >= self.tokens - N or any(window.pending for window in layer.windows)
        found = layer.masks.read(mask, place=place)
        if place:
            starts = found.starts_B
            self._place(starts if starts is None or len(starts) == rows else starts.expand(rows), found.last_start)
            if starts is None:  # the mask is causal in all rows
                return (None if N in (1, self.tokens) else found.seen_BNS[:1]), found.bias
        return found.seen_BNS, found.bias

    def _place(self, starts_B: Tensor | None, last_start: int) -> None:
        """Set where the rows start.

        Raises:
            UnsupportedModelError: Tokens of a row are in its windows, and the mask now starts it elsewhere.
        """
        layer, before = self._layer, self.tokens - self.queries
        for window in layer.windows:
            if before and window.moves(starts_B, before):
                raise UnsupportedModelError(
                    f"the attention mask starts a row elsewhere than earlier passes did, before token {before}. Pass a"
                    " mask that hides the padding on the left, and nothing else, in every pass"
                )
            window.set_starts(starts_B, last_start)
        layer.last_start = last_start

    def _in_groups(self, terms: ScoreTerms) -> ScoreTerms:
        """Return the terms with query heads in the order of the groups."""

        def ordered(x: Tensor | None) -> Tensor | None:
            if x is None or x.shape[1] == 1:
                return x
            return self._layer.in_groups(x.unflatten(1, (self._layer.kv_heads, -1))).flatten(1, 2)

        return replace(terms, bias=ordered(terms.bias), sinks_BHN=ordered(terms.sinks_BHN)) if terms.any else terms

    def _attend(
        self,
        heads: slice,
        held: FullKeys | WindowKeys | None,
        query_BKGND: Tensor,
        scale: float,
        seen_BNS: Tensor | None,
        terms: ScoreTerms,
    ) -> Tensor:
        """Return the output (B, K, G, N, Dv) of one group."""
        query_BKGND, G = query_BKGND[:, heads], query_BKGND.shape[2]
        if held is None:  # query heads of a dropped KV head output zero
            return query_BKGND.new_zeros(*query_BKGND.shape[:-1], self._value_dim)
        if terms.any:

            def of_heads(x: Tensor | None) -> Tensor | None:
                return x if x is None or x.shape[1] == 1 else x[:, heads.start * G : heads.stop * G]

            terms = replace(terms, bias=of_heads(terms.bias), sinks_BHN=of_heads(terms.sinks_BHN))
        if isinstance(held, FullKeys):
            return self._attend_full(query_BKGND, held, scale, seen_BNS, terms)
        first = self.tokens == self.queries
        if first and self._layer.prefill == "full" and held.pending:
            out = held.attend_all(query_BKGND, scale, seen_BNS, terms)
        else:
            out = held.attend(query_BKGND, scale, terms, seen_BNS)
        if not self._layer.record_past:
            held.commit()
        return out

    def _attend_full(
        self, query_BKGND: Tensor, held: FullKeys, scale: float, seen_BNS: Tensor | None, terms: ScoreTerms
    ) -> Tensor:
        N, S = self.queries, held.tokens
        causal = seen_BNS is None and N == S
        if seen_BNS is None and 1 < N < S:
            at = torch.arange(S, device=query_BKGND.device)
            seen_BNS = (at <= at[S - N :, None])[None]
        return grouped_attention(query_BKGND, held.keys, held.values, scale, seen_BNS, causal=causal, terms=terms)
