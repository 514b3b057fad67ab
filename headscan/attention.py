"""The attention function that transformers calls while heads are measured.

It is registered with transformers under the name `IMPLEMENTATION` the first time it is used, and a model takes it by
``set_attn_implementation`` for as long as a door is open. Whom it reports to stands on the attention module itself, in
the attribute `SESSION`, so that models do not know of each other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headscan import blockwise, identities
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.weights import AttentionSummary, MassWidths

IMPLEMENTATION = "headscan"
SESSION = "_headscan_session"
PATHS = ("auto", "fused", "blockwise")


class Session(Protocol):
    """Whoever answers attention calls while a door is open."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Return the attention's output (B, H, N, Dv)."""
        ...


class AttentionCall:
    """One call of a layer's attention, as transformers makes it.

    Attributes:
        query_BHND, key_BKSD, value_BKSD: As the model gives them, positions already encoded.
        mask: None for plain causal attention, else what the model wants masked.
        scale: Factor of the scores.
        softcap: Cap of the scores, or None.
        sliding_window: How many keys a query sees, or None; the mask, where one is needed, says the same.
    """

    def __init__(
        self,
        query_BHND: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> None:
        self.query_BHND, self.key_BKSD, self.value_BKSD = query_BHND, key_BKSD, value_BKSD
        self.mask, self.scale, self.softcap, self.sliding_window = mask, scale, softcap, sliding_window

    @property
    def fused(self) -> bool:
        """Whether the fused identities serve this call."""
        plain = self.mask is None and self.softcap is None
        same_width = self.query_BHND.shape[-1] == self.value_BKSD.shape[-1]
        return plain and same_width and self.query_BHND.device.type == "cpu"

    def run(
        self, needs: frozenset[str], widths: MassWidths, *, value_norms: bool, path: str = "auto"
    ) -> tuple[Tensor, AttentionSummary]:
        """Attend and measure, in float32 whatever the model's dtype.

        Args:
            needs: Numbers per query, of `headscan.weights.per_query_needs`.
            widths: Widths of sink and recent mass.
            value_norms: Whether norms of the value vectors are wanted.
            path: ``fused``, ``blockwise``, or ``auto``: fused where it serves.
        """
        if self.query_BHND.shape[2] != self.key_BKSD.shape[2]:
            raise UnsupportedModelError(
                f"{self.query_BHND.shape[2]} queries meet {self.key_BKSD.shape[2]} keys: heads are measured on whole "
                "sequences, without a KV cache; pass use_cache=False"
            )
        if path not in PATHS:
            raise InterventionError(f"unknown attention path {path!r}: choose {', '.join(PATHS)}")
        if path == "fused" and not self.fused:
            raise UnsupportedModelError("fused attention does not serve this model or device: use path='auto'")
        dtype = torch.promote_types(self.query_BHND.dtype, torch.float32)
        query, key, value = (x.to(dtype) for x in (self.query_BHND, self.key_BKSD, self.value_BKSD))
        if path == "blockwise" or not self.fused:
            out, numbers = blockwise.attend(
                query, key, value, self.scale, needs, widths, mask=self.mask, softcap=self.softcap
            )
        else:
            out, numbers = identities.attend(query, key, value, self.scale, needs, widths)
        norms = value.norm(dim=-1) if value_norms else None
        summary = AttentionSummary(numbers, norms, query.shape[1] // key.shape[1], query.device)
        return out.to(self.query_BHND.dtype), summary


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; calling it again changes nothing."""
    if IMPLEMENTATION not in AttentionInterface():
        AttentionInterface.register(IMPLEMENTATION, _forward)
        # The mask of sdpa: none at all where attention is plainly causal, else booleans.
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    session: Session | None = getattr(module, SESSION, None)
    if session is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **kwargs
        )
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds learned sinks or position biases to its scores, which are not measured yet"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
    if attention_mask is None and query.shape[2] > 1 and not causal:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens too, and only causal attention is measured yet"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = session.attend(module, AttentionCall(query, key, value, attention_mask, scale, softcap, sliding_window))
    return out.transpose(1, 2).contiguous(), None
