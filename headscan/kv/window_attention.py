"""Attention of heads whose KV cache keeps only the first and the last keys.

A query at position ``p`` sees the ``sink`` first keys of its text, and the keys at positions ``p - recent + 1`` to
``p`` (streaming heads of arXiv 2309.17453 and 2410.10819). Time and memory are linear in the length, and the result is
differentiable.

Shapes: B sequences, N queries, K KV heads, G query heads per KV head, S sink keys, T other keys, D and Dv widths.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.cache_attention import PLAIN, ScoreTerms, scored_output

#: Queries in one block; a GPU runs few large blocks faster, a CPU small ones.
_BLOCK = {"cpu": 128}
_GPU_BLOCK = 1024
#: Largest number of elements of a mask that is copied for every KV head.
_MOST_MASK = 1 << 26


def window_attention(
    query_BKGND: Tensor,
    sink_keys: tuple[Tensor, Tensor],
    tail_keys: tuple[Tensor, Tensor],
    recent: int,
    scale: float,
    *,
    tail_start: int = 0,
    starts_B: Tensor | None = None,
    terms: ScoreTerms = PLAIN,
) -> Tensor:
    """Return the output (B, K, G, N, Dv) of window heads.

    Args:
        sink_keys: Keys (B, K, S, D) and values (B, K, S, Dv) of the first tokens of each text.
        tail_keys: Keys (B, K, T, D) and values of the last T tokens, the queries' own at the end; at least the last
            ``recent - 1 + N`` tokens, or all. Keys of the sink among them are left out.
        recent: Number of last keys that a query sees, its own included.
        tail_start: Position of the first key of ``tail_keys``.
        starts_B: Position of the first real token of each row, for batches padded on the left; None if all are 0.
            Outputs of padding are finite and have no meaning.
        terms: Changes of the scores; its bias covers the keys of all tokens.
    """
    (sink_key, sink_value), (tail_key, tail_value) = sink_keys, tail_keys
    N, S, T = query_BKGND.shape[3], sink_key.shape[2], tail_key.shape[2]
    block = _BLOCK.get(query_BKGND.device.type, _GPU_BLOCK)
    outs = []
    for start in range(0, N, block):
        stop = min(start + block, N)
        # Indices into the tail: the first key that the block's first query sees, and the last query's own.
        first, last = max(0, T - N + start - recent + 1), T - N + stop
        key = torch.cat([sink_key, tail_key[:, :, first:last]], 2)
        value = torch.cat([sink_value, tail_value[:, :, first:last]], 2)
        seen_BNS = _seen(S, tail_start + first, tail_start + last, stop - start, recent, starts_B, key.device)
        query, part = query_BKGND[:, :, :, start:stop], terms
        if terms.any:
            position = _positions(S, tail_start + first, tail_start + last, starts_B, key.device)
            part = terms_at(terms, position, slice(start, stop))
        outs.append(grouped_attention(query, key, value, scale, seen_BNS, terms=part))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 3)


def windowed_output(
    query_BHND: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, sink: int, recent: int, scale: float
) -> Tensor:
    """Return the output (B, H, N, Dv) of heads with one window, from the keys of all tokens; the queries are the last
    ones.
    """
    K = key_BKSD.shape[1]
    out = window_attention(
        query_BHND.unflatten(1, (K, -1)),
        (key_BKSD[:, :, :sink], value_BKSD[:, :, :sink]),
        (key_BKSD, value_BKSD),
        recent,
        scale,
    )
    return out.flatten(1, 2)


def grouped_attention(
    query_BKGND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    scale: float,
    seen_BNS: Tensor | None,
    *,
    causal: bool = False,
    terms: ScoreTerms = PLAIN,
) -> Tensor:
    """Return attention (B, K, G, N, Dv) over the keys that ``seen_BNS`` (B or 1, N, S) marks; None marks all. A KV head
    serves its group by a stride of zero. ``causal`` needs as many queries as keys and no ``seen_BNS``; the bias of
    ``terms`` covers these keys.
    """
    B, K, G, N, D = query_BKGND.shape
    if terms.any:
        mask = None if seen_BNS is None else seen_BNS[:, None]
        return scored_output(query_BKGND.flatten(1, 2), key_BKSD, value_BKSD, scale, mask, terms).unflatten(1, (K, G))
    S = key_BKSD.shape[2]
    if N == 1:  # the queries of a group are rows of one product
        mask = None if seen_BNS is None else seen_BNS[:, None]
        out = F.scaled_dot_product_attention(
            query_BKGND.flatten(2, 3), key_BKSD, value_BKSD, attn_mask=mask, scale=scale
        )
        return out.unflatten(2, (G, N))
    if seen_BNS is not None and len(seen_BNS) > 1 and B * K * N * S > _MOST_MASK:
        rows = zip(*(x.split(1) for x in (query_BKGND, key_BKSD, value_BKSD, seen_BNS)), strict=True)
        return torch.cat([grouped_attention(query, key, value, scale, seen) for query, key, value, seen in rows])
    query = query_BKGND.reshape(B * K, G, N, D)
    key, value = (x.reshape(B * K, 1, S, x.shape[-1]).expand(-1, G, -1, -1) for x in (key_BKSD, value_BKSD))
    mask = None
    if seen_BNS is not None:
        mask = seen_BNS if len(seen_BNS) == 1 else seen_BNS.repeat_interleave(K, 0)
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return out.unflatten(0, (B, K))


def terms_at(terms: ScoreTerms, position_BS: Tensor, queries: slice = slice(None)) -> ScoreTerms:
    """Return the changes of the scores of some queries with the keys at ``position_BS`` (B or 1, S)."""
    bias, sinks = terms.bias, terms.sinks_BHN
    if sinks is not None and sinks.shape[2] > 1:
        sinks = sinks[:, :, queries]
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, queries]
        if len(position_BS) == 1:
            bias = bias[..., position_BS[0]]
        else:
            B = len(position_BS)
            index = position_BS[:, None, None].expand(B, *bias.shape[1:3], -1)
            bias = bias.expand(B, -1, -1, -1).gather(3, index)
    return replace(terms, bias=bias, sinks_BHN=sinks)


def seen_by_window(
    queries: int, keys: int, sink: int, recent: int, device: torch.device, starts_B: Tensor | None = None
) -> Tensor:
    """Return which keys each query sees: bool (B or 1, N, S); the queries belong to the last tokens."""
    query_at = torch.arange(keys - queries, keys, device=device)[:, None]
    key_at = torch.arange(keys, device=device)
    starts = torch.zeros(1, 1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None, None]
    near = query_at - key_at < recent
    return (key_at <= query_at) & (key_at >= starts) & (near | (key_at < starts + sink))


def _seen(
    sinks: int, first: int, last: int, queries: int, recent: int, starts_B: Tensor | None, device: torch.device
) -> Tensor:
    """Return which sink keys, then which keys at ``first`` to ``last - 1``, the last queries see: (B or 1, N, S)."""
    starts = torch.zeros(1, 1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None, None]
    query_at = torch.arange(last - queries, last, device=device)[:, None]
    key_at = torch.arange(first, last, device=device)
    sink_at = torch.arange(sinks, device=device)
    in_tail = (key_at <= query_at) & (query_at - key_at < recent) & (key_at >= starts + sinks)
    in_sink = starts + sink_at <= query_at
    # A padding query sees one key, because attention to no key would be NaN and spread to later layers.
    in_sink = in_sink | ((query_at < starts) & (sink_at == 0))
    if not sinks:
        in_tail = in_tail | ((query_at < starts) & (key_at == query_at))
    return torch.cat([in_sink.expand(*in_tail.shape[:2], sinks), in_tail], 2)


def _positions(sinks: int, first: int, last: int, starts_B: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions (B or 1, S) of the sink keys, then of the keys at ``first`` to ``last - 1``."""
    starts = torch.zeros(1, 1, dtype=torch.long, device=device) if starts_B is None else starts_B[:, None]
    sink_at = (starts + torch.arange(sinks, device=device)).clamp_max(last - 1)
    return torch.cat([sink_at, torch.arange(first, last, device=device).expand(len(starts), -1)], 1)
