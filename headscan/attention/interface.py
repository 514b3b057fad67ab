"""The attention function that transformers calls while heads are measured.

It is registered with transformers at its first use, and a model uses it while a hook is open. `SESSIONS` holds the
session of each attention module, so models do not affect each other.

It has two names, which differ in their masks. Under `IMPLEMENTATION` a sliding window needs no N x N mask, because the
call passes ``sliding_window``, as for FlashAttention. Under `MASKED` the mask encodes the window, for models whose
calls do not pass it. Discovery decides between the two under a third name, `PROBE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from headscan.attention.calls import ScoredCall, Session

IMPLEMENTATION, MASKED, PROBE = "headscan", "headscan-masked", "headscan-probe"
#: The session that answers the calls of an attention module, while a hook is open on it.
SESSIONS: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()
#: The window that the model requested, by mask made for `PROBE`; keyed by identity, since tensors compare by element.
_WINDOWS = WeakIdKeyDictionary()


@contextmanager
def open_session(modules: Iterable[nn.Module], session: Session) -> Iterator[None]:
    """Let a session answer the attention calls of modules without sessions."""
    modules = list(modules)
    SESSIONS.update(dict.fromkeys(modules, session))
    try:
        yield
    finally:
        for module in modules:
            del SESSIONS[module]


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention implementation of a model; restore it on exit.

    Models inside the model are set, too.
    """
    _register()
    configs = {
        id(part.config): part.config
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part._can_set_attn_implementation()
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        # `set_attn_implementation` would warn about parts without one, and lose the implementation of each part.
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _register() -> None:
    """Register the three names with transformers, once."""
    if IMPLEMENTATION not in AttentionInterface():
        for name, mask in ((IMPLEMENTATION, _unwindowed_mask), (MASKED, sdpa_mask), (PROBE, _probe_mask)):
            AttentionInterface.register(name, _forward)
            AttentionMaskInterface.register(name, mask)


def window_is_named(call: ScoredCall) -> bool:
    """Return True if a `PROBE` call passes the window of its mask."""
    return call.mask is None or _WINDOWS.get(call.mask, "not made by `_probe_mask`") == call.sliding_window


def _unwindowed_mask(
    *, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Return None if attention is plainly causal, with or without a window."""
    local_size = None if allow_is_causal_skip else local_size
    return sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs)


def _probe_mask(*, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    mask = sdpa_mask(allow_is_causal_skip=False, local_size=local_size, **kwargs)
    if mask is not None:
        _WINDOWS[mask] = local_size
    return mask


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
    # Learned sinks are one logit per head (gpt-oss and similar models) or one per query (B, H, N, 1).
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1)
    call = ScoredCall(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=bool(is_causal),
        mask=attention_mask,
        bias=position_bias,
        window=sliding_window if attention_mask is None else None,
        softcap=softcap,
        sinks_BHN=None if sinks is None else sinks.squeeze(-1),
        sliding_window=sliding_window,
    )
    session = SESSIONS.get(module)
    if session is not None:
        out = session.attend(module, call)
    else:  # no hook is open on this attention: another kind of site, or a part that reads no tokens
        cross = query.shape[2] != key.shape[2]
        out = call.placed(causal=call.causal and not cross, cross=cross).output()
    return out.transpose(1, 2).contiguous(), None
