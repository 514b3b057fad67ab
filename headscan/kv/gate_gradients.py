"""Derivatives of the loss with respect to the gates of all KV heads, from one forward and one backward pass.

Shapes: B sequences, N tokens, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value, E width of
a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import attention_hook
from headscan.errors import UnsupportedModelError
from headscan.gradients.backward import backward
from headscan.gradients.example_losses import NextTokenLoss
from headscan.grid import AttentionSite
from headscan.kv.kept_keys import HeadGroup, Window
from headscan.kv.kv_windows import windowed
from headscan.kv.window_attention import windowed_output
from headscan.layers.blocks import find_blocks
from headscan.models.loaded_model import LoadedModel
from headscan.sizing.window_candidates import KvHead


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
    """Return the derivatives of each sequence's mean loss by the gates of KV heads, all gates at one value.

    Args:
        ids: Token ids (B, N) on the model's input device, padded on the right.
        lengths: Real tokens of each sequence.
        window: The window of closed gates.
        heads: KV heads with a gate.
        gate: Value of all gates: 1 is the full cache, 0 the window.
        scored: Number of scored tokens of each sequence, its last ones; None scores all but the first.

    Returns:
        float32 (B, heads), in nats per scored token, on the CPU.

    Raises:
        UnsupportedModelError: The model has no blocks that run one after another, computes its own attention weights,
            is compiled or in train mode.
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
        found = backward(lm, loss, gates=gates)
    return torch.stack([found[layer][:, kv_head] for layer, kv_head in heads], 1).float()


@contextmanager
def gated_attention(lm: LoadedModel, gates: Mapping[int, Tensor], window: Window) -> Iterator[None]:
    """Let the KV heads of some layers output ``gate * full + (1 - gate) * window``; differentiable in all layers.

    Args:
        gates: By layer, the gate of each sequence and KV head (B, K), 0 to 1, float32 or wider.
        window: The window of the windowed output.

    Raises:
        UnsupportedModelError: In a pass: a layer with gates computes its own attention weights.
    """

    def attended(site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall):
            if site.layer in gates:
                raise UnsupportedModelError(
                    f"{lm.source} computes its own attention weights in layer {site.layer}, so windows have no "
                    "gradient. Load it with attn_implementation='sdpa'"
                )
            return call.output()
        full = _output(call)
        if site.layer not in gates:
            return full
        near = _near(call, window)
        # Some models show the keys once for every query head.
        gate_BH11 = gates[site.layer][:, list(site.kv_head_of), None, None].to(full.device)
        return (near + gate_BH11 * (full - near)).to(full.dtype)

    with attention_hook(lm, attended):
        yield


def _near(call: ScoredCall, window: Window) -> Tensor:
    """Return the windowed output (B, H, N, Dv), differentiable."""
    if _plain(call):
        return _output(call, window)
    return windowed(call, (HeadGroup(tuple(range(call.num_key_value_heads)), window),))


def _plain(call: ScoredCall) -> bool:
    """Return True if fused calls compute this attention; they need values at most as wide as keys."""
    changed = any(x is not None for x in (call.mask, call.bias, call.softcap, call.sinks_BHN))
    return call.causal and not changed and call.value_dim <= call.head_dim


def _output(call: ScoredCall, window: Window | None = None) -> Tensor:
    """Return the output (B, H, N, Dv) of a whole sequence, differentiable, and with memory linear in the length.

    The fused kernels of statistics are not used: they give no derivative of the log-sum-exp.
    """
    D, Dv = call.head_dim, call.value_dim
    if not _plain(call):
        assert window is None  # `_near` handles such calls
        ones = torch.ones(call.sequences, dtype=torch.long, device=call.device)
        return call.measure(AttentionRequest(frozenset(), ones, ones, MassWidths(), path="blockwise"))[0]
    value = F.pad(call.value_BKSD, (0, D - Dv)) if Dv < D else call.value_BKSD
    if call.window is not None and window is None:
        window = Window(0, call.window)
    if window is not None:
        out = windowed_output(call.query_BHND, call.key_BKSD, value, window.sink, window.recent, call.scale)
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
