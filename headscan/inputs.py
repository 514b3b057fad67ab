"""What a forward pass is called with: for decoders, encoders and encoder-decoders, and where it goes.

Shapes: B sequences, N tokens, padded on the right.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscan.reductions import real_tokens


def run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """A forward pass without logits, where the model below its head can be called, and without a KV cache of its own.

    ``logits_to_keep`` would save the logits, too, but some models then leave tokens out of their last layers.
    """
    body = model.base_model
    known = inspect.signature(body.forward).parameters
    cacheless = {"use_cache": False} if "use_cache" in known or "kwargs" in known else {}
    return body(**{**cacheless, **inputs})


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go, also when accelerate keeps the embedding elsewhere until its layer runs."""
    embeddings: Any = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)


def batch_kwargs(
    input_ids: Tensor, lengths: Tensor, *, causal: bool, decoder_input_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Token ids, and a mask of the real ones where they would otherwise see padding.

    Padding on the right is out of sight of causal attention, and without a mask the cheaper kernels serve.
    """
    kwargs = {"input_ids": input_ids}
    if not causal:
        kwargs["attention_mask"] = real_tokens(lengths, input_ids.shape[1]).long()
    if decoder_input_ids is not None:
        kwargs["decoder_input_ids"] = decoder_input_ids
    return kwargs
