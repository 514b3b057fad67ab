"""Interception of attention in models that do not use transformers' attention interface.

Such a model calls either ``scaled_dot_product_attention``, which shows query, key and value, or a softmax whose result
it multiplies with the values, which shows the weights. A torch function mode sees both while it is entered; the model
itself is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headscan.attention.calls import AttentionCall, ScoredCall, WeightsCall

_SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch._softmax}
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
#: Functions that attention weights may pass through between softmax and values; their result counts as the weights.
_KEEPS = {
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.view,
    Tensor.reshape,
    Tensor.contiguous,
    Tensor.masked_fill,
    torch.masked_fill,
    F.dropout,
    torch.dropout,
}


class Interceptor(TorchFunctionMode):
    """A function mode that passes attention calls inside ``modules`` to a callback.

    Args:
        attend: The callback, with the signature of `Session.attend`.
        modules: Modules to watch; a call belongs to the innermost one that runs.
        sequences: Returns the number of sequences in a number of (sequence x head) rows, given the module.
    """

    def __init__(
        self,
        attend: Callable[[nn.Module, AttentionCall], Tensor],
        modules: Iterable[nn.Module],
        sequences: Callable[[nn.Module, int], int],
    ) -> None:
        super().__init__()
        self._attend, self._modules, self._sequences = attend, tuple(modules), sequences
        self._running: list[nn.Module] = []
        # By id; keeping the tensor prevents that another one gets its id.
        self._weights: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for module in self._modules:
            self._hooks.callback(module.register_forward_pre_hook(self._entered).remove)
            self._hooks.callback(module.register_forward_hook(self._left, always_call=True).remove)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._running:
            return func(*args, **kwargs)
        module = self._running[-1]
        if func is F.scaled_dot_product_attention:
            return self._attend(module, _scored_call(*args, **kwargs))
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        if func in _SOFTMAX or (func in _KEEPS and args and self._is_weights(args[0])):
            self._weights[id(out)] = out
        elif func in _MATMUL and len(args) == 2 and self._is_weights(args[0]):
            call = self._weights_call(module, args[0], args[1], out)
            if call is not None:
                return self._attend(module, call).reshape(out.shape)
        return out

    def _entered(self, module: nn.Module, _: Any) -> None:
        self._running.append(module)

    def _left(self, module: nn.Module, *_: Any) -> None:
        # After an exception in one of its own hooks, a module leaves without having entered.
        if self._running and self._running[-1] is module:
            self._running.pop()
        if not self._running:
            self._weights.clear()

    def _is_weights(self, tensor: Any) -> bool:
        return id(tensor) in self._weights

    def _weights_call(self, module: nn.Module, weights: Tensor, value: Tensor, out: Tensor) -> AttentionCall | None:
        if weights.ndim not in (3, 4) or value.ndim != weights.ndim:
            return None
        if weights.ndim == 3:
            sequences = self._sequences(module, len(weights))
            weights, value, out = (x.unflatten(0, (sequences, -1)) for x in (weights, value, out))
        # Row 0 sees the last key only if attention is not causal.
        causal = weights.shape[-1] > 1 and not bool((weights[:, :, 0, -1] > 0).any())
        return WeightsCall(weights, value, out, causal)


def _scored_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ScoredCall:
    """Return the call for the arguments of ``scaled_dot_product_attention``."""
    if attn_mask is not None:
        corner = attn_mask[..., 0, -1]
        seen = corner if attn_mask.dtype == torch.bool else corner > torch.finfo(attn_mask.dtype).min / 2
        is_causal = attn_mask.shape[-1] > 1 and not bool(seen.any())
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return ScoredCall(query, key, value, scale, causal=is_causal, mask=attn_mask)
