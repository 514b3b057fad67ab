"""Finding the heads of a loaded model by watching one short forward pass, not by a list of names."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headscan.attention import IMPLEMENTATION, SESSION, AttentionCall, register
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite, HeadGrid

_PROBE_TOKENS = 4


def forward_kwargs(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments that keep a measuring forward pass cheap: no KV cache, one row of logits."""
    kwargs: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = 1
    return kwargs


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go, also when accelerate keeps the embedding elsewhere until its layer runs."""
    embeddings: Any = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)


def discover(model: PreTrainedModel) -> HeadGrid:
    """Find every attention and its output projection.

    Raises:
        UnsupportedModelError: The model's attention does not go through transformers' attention interface, or a layer's
            output projection cannot be told.
    """
    names = {module: name for name, module in model.named_modules()}
    probe = _Probe(names)
    before = model.config._attn_implementation
    register()
    with ExitStack() as cleanup:
        for module in names:
            setattr(module, SESSION, probe)
            cleanup.callback(delattr, module, SESSION)
            if _is_projection(module):
                cleanup.callback(module.register_forward_pre_hook(probe.projection_called).remove)
        model.set_attn_implementation(IMPLEMENTATION)
        cleanup.callback(model.set_attn_implementation, before)
        ids = torch.arange(_PROBE_TOKENS, device=input_device(model))[None] % model.config.get_text_config().vocab_size
        with torch.no_grad():
            model(input_ids=ids, **forward_kwargs(model))
    probe.complain_if_open()
    if not probe.sites:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention heads that transformers' attention interface shows: "
            "its heads cannot be measured yet"
        )
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    sites = tuple(sorted(probe.sites, key=lambda site: site.layer))
    return HeadGrid(sites, max(layers, sites[-1].layer + 1))


def _is_projection(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix of its own (Linear, Conv1D and their quantised kin)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


class _Probe:
    """Writes down attention calls, and which projection of the same module takes their output."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.sites: list[AttentionSite] = []
        self._open: tuple[nn.Module, AttentionCall] | None = None

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.complain_if_open()
        self._open = (module, call)
        out, _ = sdpa_attention_forward(
            module, call.query_BHND, call.key_BKSD, call.value_BKSD, call.mask, scaling=call.scale
        )
        return out.transpose(1, 2)

    def projection_called(self, projection: nn.Module, args: tuple[Any, ...]) -> None:
        if self._open is None or not args or not isinstance(args[0], Tensor):
            return
        module, call = self._open
        inside = self.names[projection].startswith(self.names[module] + ".")
        heads, width = call.query_BHND.shape[1], call.value_BKSD.shape[-1]
        layer = getattr(module, "layer_idx", None)
        if inside and args[0].shape[-1] == heads * width:
            self.sites.append(
                AttentionSite(
                    site="self",
                    layer=len(self.sites) if layer is None else int(layer),
                    path=self.names[module],
                    output_projection=self.names[projection],
                    num_attention_heads=heads,
                    num_key_value_heads=call.key_BKSD.shape[1],
                    head_dim=call.query_BHND.shape[-1],
                    value_dim=width,
                    sliding_window=call.sliding_window,
                )
            )
            self._open = None

    def complain_if_open(self) -> None:
        """Refuse a model one of whose attentions nothing takes the output of."""
        if self._open is not None:
            raise UnsupportedModelError(
                f"no projection inside {self.names[self._open[0]]} takes the output of its heads: "
                "they could be measured, but not silenced"
            )
