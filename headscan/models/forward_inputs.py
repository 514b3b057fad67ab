"""Inputs of forward passes of decoders, encoders and encoder-decoders, and means over their real tokens.

Shapes: B sequences, N tokens (padded on the right), H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def run_forward(model: PreTrainedModel, inputs: dict[str, Any], for_hooks: Mapping[str, Tensor] | None = None) -> Any:
    """Run a forward pass without logits and without a KV cache, in the dtype of the loaded model, without autocast.

    ``logits_to_keep`` would omit the logits too, but some models then drop tokens in their last layers. ``for_hooks``
    are further arguments that forward pre-hooks see and the model does not receive.
    """
    body = model.base_model
    parameters = inspect.signature(body.forward).parameters
    cacheless = {"use_cache": False} if "use_cache" in parameters or "kwargs" in parameters else {}
    hook_inputs = dict(for_hooks or {})

    def drop_hook_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, {name: value for name, value in kwargs.items() if name not in hook_inputs}

    # Pre-hooks run in order of registration: all others see the arguments before this one drops them.
    dropping = body.register_forward_pre_hook(drop_hook_inputs, with_kwargs=True) if hook_inputs else nullcontext()
    with dropping, without_autocast(input_device(model)):
        return body(**{**cacheless, **inputs, **hook_inputs})


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn ``torch.autocast`` off on a device, because it rounds operands of matrix products to half precision."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of token ids, also with an offloaded embedding."""
    embeddings: Any = model.get_input_embeddings()
    accelerate_hook = getattr(embeddings, "_hf_hook", None)
    device = getattr(accelerate_hook, "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)


def batch_kwargs(
    input_ids: Tensor, lengths: Tensor, *, causal: bool, decoder_input_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Return token ids, with a padding mask unless attention is causal, which never sees padding on the right."""
    kwargs = {"input_ids": input_ids}
    if not causal:
        kwargs["attention_mask"] = real_tokens(lengths, input_ids.shape[1]).long()
    if decoder_input_ids is not None:
        kwargs["decoder_input_ids"] = decoder_input_ids
    return kwargs


def real_tokens(lengths: Tensor, tokens: int) -> Tensor:
    """Return the real tokens, bool (B, N), from ``lengths`` (B,)."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def before_last(lengths: Tensor, counts: Tensor, tokens: int) -> Tensor:
    """Return the tokens that predict the last ``counts`` (B,) tokens of each sequence, bool (B, N)."""
    return real_tokens(lengths - 1, tokens) & ~real_tokens(lengths - 1 - counts, tokens)


class TokenMeans:
    """Means over the real tokens of padded sequences, whose numbers are ``lengths`` (B,). ``real`` (B, N) says which
    they are; None means the first ones.

    Masks are made once for all layers, and several means in one pass: on a GPU, starting an operator takes longer than
    adding a few numbers.
    """

    def __init__(self, lengths: Tensor, real: Tensor | None = None) -> None:
        self.lengths, self._real = lengths, real
        self._masks: dict[tuple[int, tuple[bool, ...]], tuple[Tensor, Tensor]] = {}

    def mean(self, values_BHN: Tensor) -> Tensor:
        """Return the mean over real tokens (B, H), in float32."""
        return self.means([values_BHN], [False])[0]

    def means(self, values: Sequence[Tensor], skip_first: Sequence[bool]) -> Tensor:
        """Return the means of several numbers, (B, H, N) each: (numbers, B, H); NaN for one token without its first."""
        stacked = values[0][None] if len(values) == 1 else torch.stack([values_BHN.float() for values_BHN in values])
        real, counts = self._counted_tokens(stacked.shape[-1], tuple(skip_first))
        # `where` instead of a product, since numbers at padding may be NaN.
        return torch.where(real, stacked.float(), 0.0).sum(-1) / counts

    def real(self, tokens: int) -> Tensor:
        """Return which tokens are real, bool (B, N)."""
        return self._counted_tokens(tokens, (False,))[0][0, :, 0]

    def _counted_tokens(self, tokens: int, skip_first: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
        """Return the tokens that count for each mean (means, B, 1, N), and their numbers (means, B, 1)."""
        if (tokens, skip_first) not in self._masks:
            real = real_tokens(self.lengths, tokens) if self._real is None else self._real
            after_first = real & (torch.arange(tokens, device=real.device) > 0)
            masks = torch.stack([after_first if skip else real for skip in skip_first])[:, :, None]
            counts = torch.stack([self.lengths - int(skip) for skip in skip_first])[..., None]
            self._masks[tokens, skip_first] = masks, counts
        return self._masks[tokens, skip_first]


def widened(values: Tensor) -> Tensor:
    """Return values as float32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def wide_norm(values: Tensor) -> Tensor:
    """Return the norm of a tensor in float32 or wider. In float16 a norm above 65,504 would be infinite."""
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def at_last_token(values_BHN: Tensor, lengths: Tensor) -> Tensor:
    """Return the values at the last real token (B, H)."""
    index = (lengths - 1)[:, None, None].expand(-1, values_BHN.shape[1], 1)
    return values_BHN.gather(-1, index).squeeze(-1)


_Key = TypeVar("_Key", bound=Hashable)


def on_cpu(measured: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Copy the numbers to the CPU, with one blocking copy per device."""
    copies: dict[_Key, Tensor] = {}
    for device, dtype in {(values.device, values.dtype) for values in measured.values()}:
        tensors = {key: values for key, values in measured.items() if (values.device, values.dtype) == (device, dtype)}
        flat = torch.cat([values.flatten() for values in tensors.values()]).cpu()
        flat_copies = flat.split([values.numel() for values in tensors.values()])
        for (key, values), flat_copy in zip(tensors.items(), flat_copies, strict=True):
            copies[key] = flat_copy.view(values.shape)
    return copies
