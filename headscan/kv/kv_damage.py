"""Damage of windows: how much loss each KV head causes if it alone keeps only a window of its keys.

``kv_damage`` estimates it for all KV heads at once. Each KV head outputs ``gate * full + (1 - gate) * window``, and the
negated derivative of the loss with respect to the gate, taken with all gates at 0.5, ranks the KV heads as removing
them one by one does. At 1, where the model was trained to a stationary point, the derivative is no guide on ordinary
text. One forward and one backward pass give the derivatives of all gates.

Shapes: B sequences, N tokens, L layers, H query heads, K KV heads (of the widest layer), G = H / K, D and Dv widths of
a key and of a value, E width of a hidden state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import attention_hook
from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.errors import NotFiniteError, PlanMismatchError, SequenceError, UnsupportedModelError
from headscan.gradients.backward import backward
from headscan.gradients.losses import NextTokenLoss
from headscan.grid import AttentionSite, HeadGrid
from headscan.kv.kv_windows import windowed
from headscan.kv.padded_masks import MaskReader
from headscan.kv.window_keys import windowed_output
from headscan.layers.blocks import find_blocks
from headscan.measure.collect import TokenIds, check_ids
from headscan.models.loaded_model import LoadedModel, check_loaded
from headscan.models.token_batches import pass_tokens, run_halving, whole_batches
from headscan.options import BATCH_TOKENS
from headscan.sizing.model_sizes import NO_CACHE, LayerCache, find_caches
from headscan.windows import KvHead, Window


def window_candidates(lm: LoadedModel) -> tuple[KvHead, ...]:
    """Return the KV heads of a model that can keep a window: those with an unbounded cache of their own."""
    if not lm.grid.predicts_next_token:
        raise UnsupportedModelError(f"{lm.source} is not a decoder, so it has no plan for a KV cache. Load a decoder")
    return candidates_of(lm.grid, find_caches(lm.model).get("self", ()), lm.source)


def candidates_of(grid: HeadGrid, caches: Sequence[LayerCache], source: str) -> tuple[KvHead, ...]:
    """Return the KV heads of a grid that can keep a window, by the KV cache of each layer."""
    candidates: list[KvHead] = []
    reasons: dict[str, int] = {}
    for site in grid.sites:
        why = _why_not(grid, caches, site.layer)
        if why is None:
            candidates += [(site.layer, kv_head) for kv_head in range(site.num_key_value_heads)]
        else:
            reasons[why] = reasons.get(why, 0) + site.num_key_value_heads
    if not candidates:
        why = "; ".join(f"{count} {reason}" for reason, count in reasons.items()) or "it has no attention layers"
        raise UnsupportedModelError(f"no KV head of {source} can keep a window: {why}. Keep its full cache")
    return tuple(candidates)


def _why_not(grid: HeadGrid, caches: Sequence[LayerCache], layer: int) -> str | None:
    """Return the reason why the KV heads of a layer cannot keep a window; None if they can."""
    site = grid.site_of(layer)
    cache = caches[layer] if layer < len(caches) else NO_CACHE
    if site.kv_shared_from is not None:
        return "read the keys of an earlier layer"
    if any(other.kv_shared_from == layer for other in grid.sites):
        return "share their keys with later layers"
    if not site.causal or not cache.bytes_per_token:
        return "have no cache"
    if cache.heads % site.num_key_value_heads:
        return "share one latent vector per token (MLA)"
    if site.sliding_window is not None or cache.tokens is not None:
        return "keep a window already"
    return None


def gate_gradients(
    lm: LoadedModel,
    ids: Tensor,
    lengths: Sequence[int],
    window: Window,
    heads: Sequence[KvHead],
    *,
    gate: float,
    scored: Sequence[int] | None,
) -> Tensor:
    """Return the derivatives of each sequence's mean loss by the gates of KV heads, all gates at one value: float32 (B,
    heads), in nats per scored token, on the CPU. A gate of 1 is the full cache, 0 the window. The ids (B, N) are padded
    on the right. ``scored`` is the number of last tokens of each sequence that count; None counts all but the first.
    """
    find_blocks(lm)  # it runs another batch, which would not fit the gates
    loss = NextTokenLoss.of(ids, lengths, scored)
    widths = {site.layer: site.num_key_value_heads for site in lm.grid.sites}
    dtype = torch.promote_types(lm.model.dtype, torch.float32)
    gates = {
        layer: torch.full((len(ids), widths[layer]), gate, dtype=dtype, requires_grad=True)
        for layer in sorted({layer for layer, _ in heads})
    }
    with gated_attention(lm, gates, window):
        gradients = backward(lm, loss, gates=gates)
    return torch.stack([gradients[layer][:, kv_head] for layer, kv_head in heads], 1).float()


@contextmanager
def gated_attention(lm: LoadedModel, gates: Mapping[int, Tensor], window: Window) -> Iterator[None]:
    """Let KV heads of layers with gates (B, K) output ``gate * full + (1 - gate) * window``, differentiable."""
    masks = MaskReader()

    def on_attention(site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall):
            if site.layer in gates:
                raise UnsupportedModelError(
                    f"{lm.source} computes its own attention weights in layer {site.layer}, so windows have no "
                    "gradient. Load it with `attn_implementation='sdpa'`"
                )
            return call.output()
        if site.layer not in gates:
            return _output(call)
        # Some models show the keys once for every query head.
        gate_BH11 = gates[site.layer][:, list(site.kv_head_of), None, None].to(call.device)
        return gated_output(call, gate_BH11, window, masks)

    with attention_hook(lm, on_attention):
        yield


def gated_output(call: ScoredCall, gate_BH11: Tensor, window: Window, masks: MaskReader) -> Tensor:
    """Return the output (B, H, N, Dv) of heads with a gate each between all keys and a window."""
    full = _output(call)
    near = _near(call, window, masks)
    return (near + gate_BH11 * (full - near)).to(full.dtype)


def _near(call: ScoredCall, window: Window, masks: MaskReader) -> Tensor:
    """Return the windowed output (B, H, N, Dv), differentiable."""
    if _plain(call):
        return _output(call, window)
    return windowed(call, ((tuple(range(call.num_key_value_heads)), window),), masks)


def _plain(call: ScoredCall) -> bool:
    """Return True if fused calls compute this attention; they need values at most as wide as keys."""
    changed = any(x is not None for x in (call.mask, call.bias, call.softcap, call.sinks_BHN))
    return call.causal and not changed and call.value_dim <= call.head_dim


def _output(call: ScoredCall, window: Window | None = None) -> Tensor:
    """Return the output (B, H, N, Dv) of a whole sequence in linear memory, differentiable, unlike fused kernels."""
    D, Dv = call.head_dim, call.value_dim
    if not _plain(call):
        assert window is None  # `_near` handles such calls
        return call.output(path="blockwise")
    value = F.pad(call.value_BKSD, (0, D - Dv)) if Dv < D else call.value_BKSD
    if call.window is not None and window is None:
        window = Window(0, call.window)
    if window is not None:
        out = windowed_output(call.query_BHND, call.key_BKSD, value, window, call.scale)
    else:
        out = _causal(replace(call, value_BKSD=value))
    return out[..., :Dv]


def _causal(call: ScoredCall) -> Tensor:
    """Return causal attention (B, H, N, D); a KV head serves its group by a stride of zero."""
    B, H, N, D = call.query_BHND.shape
    K, G = call.num_key_value_heads, H // call.num_key_value_heads
    query = call.query_BHND.reshape(B * K, G, N, D)
    key, value = (x.reshape(B * K, 1, N, D).expand(-1, G, -1, -1) for x in (call.key_BKSD, call.value_BKSD))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=call.scale)
    return out.reshape(B, H, N, D)


_log = logging.getLogger("headscan")


def kv_damage(
    lm: LoadedModel,
    ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    sink: int = DEFAULT_SINK,
    recent: int = DEFAULT_RECENT,
    *,
    gates: Sequence[float] = (0.5,),
    scored: Sequence[int] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Return the mean of `kv_damages_by_sequence` over the sequences, given as token ids (B, N) or as B texts: float32
    (L, K), in nats per scored token.
    """
    check_loaded(lm)
    damages = kv_damages_by_sequence(
        lm, ids, lengths, sink, recent, gates=gates, scored=scored, batch_tokens=batch_tokens
    )
    return damages.nanmean(0)


def kv_damages_by_sequence(
    lm: LoadedModel,
    ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    sink: int = DEFAULT_SINK,
    recent: int = DEFAULT_RECENT,
    *,
    gates: Sequence[float] = (0.5,),
    scored: Sequence[int] | None = None,
    heads: Sequence[KvHead] | None = None,
    block: int = 1,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Estimate, for all KV heads at once, the loss increase if one KV head keeps only a window: float32 (B, L, K) in
    nats per scored token, NaN where a layer lacks the KV head or cannot keep a window, and for sequences that are not
    longer than the window. Memory is linear in the length, except for models with soft caps, position biases or learned
    sinks.

    Args:
        lm: A decoder from `headscan.load`, with all its layers.
        ids: Token ids (B, N), padded on the right with any id; or B texts, or B lists of ids.
        lengths: Real tokens of each sequence (B,); None means all N. Texts and lists have their own.
        sink: Number of first tokens in the window.
        recent: Number of last tokens in the window, the query's own included.
        gates: Values at which the derivative is taken, 0 to 1; the damage is their mean. Text needs 0.5; prompts whose
            answer lies far back are ranked well by any value.
        scored: Number of scored tokens of each sequence, its last ones; None scores all but the first.
        heads: KV heads to return; None returns all that can keep a window. All of them have gates either way, so the
            choice changes no number.
        block: Tokens of a block of the KV cache, in which a serving engine keeps windows; see `Window`.
        batch_tokens: Tokens of one pass, padding included.
    """
    if recent < 1 or sink < 0:
        raise PlanMismatchError(f"window of `sink={sink}`, `recent={recent}` (limit sink 0, recent 1). Widen it")
    window = Window(sink, recent, block)
    if not gates or not all(0 <= gate <= 1 for gate in gates):
        raise PlanMismatchError(f"`gates={tuple(gates)}` (limit 0 to 1, at least one). Change them")
    candidates = window_candidates(lm)
    places = candidates if heads is None else tuple(heads)
    unknown = sorted(set(places) - set(candidates))
    if unknown:
        raise PlanMismatchError(f"damage of (layer, KV head) {unknown[0]}: it cannot keep a window. Leave it out")
    columns = [candidates.index(place) for place in places]
    checked, real = check_ids(lm, ids, lengths)
    tokens = real.tolist()
    if scored is not None and len(scored) != len(tokens):
        raise SequenceError(f"scored has {len(scored)} entries (limit {len(tokens)} sequences). Give one for each")

    def measure(rows: list[int]) -> Tensor:
        own = [tokens[row] for row in rows]
        counts = None if scored is None else [int(scored[row]) for row in rows]
        part = checked[rows, : max(own)]
        damages = [-gate_gradients(lm, part, own, window, candidates, gate=gate, scored=counts) for gate in gates]
        return torch.stack(damages).mean(0)[:, columns]

    long = _longer_than(window, tokens)
    measured: dict[int, Tensor] = {}
    batch_tokens = pass_tokens(lm.device.type, batch_tokens)
    for batch in whole_batches([tokens[row] for row in long], batch_tokens, lm.rope_lengths.group):
        rows = [long[index] for index in batch.sequence_indices]
        for part, values in run_halving(rows, measure, tokens, lm.limits["kv_damage"]):
            measured.update(zip(part, values, strict=True))
    finite = torch.stack(list(measured.values())).isfinite()
    if not finite.all():
        wrong = int((~finite).sum())
        raise NotFiniteError(f"NaN or infinite damages: {wrong} of {finite.numel()} (limit 0). Use another `dtype`")
    widest = max(site.num_key_value_heads for site in lm.grid.sites)
    table = torch.full((len(tokens), lm.grid.num_layers, widest), float("nan"))
    layers, kv_heads = [layer for layer, _ in places], [kv_head for _, kv_head in places]
    for row, values in measured.items():
        table[row, layers, kv_heads] = values
    return table


def _longer_than(window: Window, lengths: Sequence[int]) -> list[int]:
    """Return the sequences that are longer than a window, by row; raise if none is, and warn if some are not."""
    long = [row for row, length in enumerate(lengths) if length > window.covers]
    if not long:
        raise SequenceError(
            f"the longest sequence has {max(lengths)} tokens (at least {window.covers + 1}, one more than the window). "
            "Give longer sequences, or lower `recent`"
        )
    if left_out := len(lengths) - len(long):
        _log.warning(
            "%d of %d sequences are not longer than the window of %d tokens and are left out",
            left_out,
            len(lengths),
            window.covers,
        )
    return long
