"""Attention that mixes the output of full and of windowed KV heads by a gate, for derivatives.

Shapes: B sequences, N queries, H query heads, K KV heads, G = H / K, D and Dv widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.attention_request import AttentionRequest, MassWidths
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import attention_hook
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.kv.kept_keys import HeadGroup, Window
from headscan.kv.kv_windows import windowed
from headscan.kv.window_attention import windowed_output
from headscan.models.loaded_model import LoadedModel


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
        every = HeadGroup(tuple(range(call.num_key_value_heads)), window)
        near = _output(call, window) if _plain(call) else windowed(call, (every,))
        # Some models show the keys once for every query head.
        gate_BH11 = gates[site.layer].to(full.device).repeat_interleave(site.group_size, 1)[:, :, None, None]
        return (near + gate_BH11 * (full - near)).to(full.dtype)

    with attention_hook(lm, attended):
        yield


def _plain(call: ScoredCall) -> bool:
    """Return True if fused calls compute this attention."""
    return call.causal and call.mask is None and call.bias is None and call.softcap is None and call.sinks_BHN is None


def _output(call: ScoredCall, window: Window | None = None) -> Tensor:
    """Return the output (B, H, N, Dv) of a whole sequence, differentiable, and with memory linear in the length.

    The fused kernels of statistics are not used: they give no derivative of the log-sum-exp.
    """
    D, Dv = call.head_dim, call.value_dim
    if not _plain(call) or Dv > D:
        assert window is None
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
