"""Bytes of a backward pass block by block, as plans and importances make it, from a dry run on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import MASKED, attention_implementation, open_session
from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.checkpoints.headers import read_headers
from headscan.errors import UnsupportedModelError
from headscan.gradients.losses import LOGITS
from headscan.kv.kv_damage import gated_output
from headscan.kv.padded_masks import MaskReader
from headscan.loading import empty_model
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import find_layout
from headscan.models.model_facts import MODEL_ERRORS, raise_if_out_of_memory, typed_line
from headscan.sizing.model_sizes import WITH_MARGIN, Allocations, FusedAttention, loaded_dtype, meta_inputs, shorten
from headscan.windows import Window


def backward_bytes(spec: ModelSpec, tokens: int) -> tuple[int, int]:
    """Return the peak bytes, in addition to the weights, of the derivatives by gates on all KV heads
    (`headscan.gradients.backward`): of one sequence, the inputs of all blocks, four more states for the last output and
    derivatives, and the largest graph of one block; and those of a part of the loss, which are the same for a batch.
    """
    config = spec.config()
    model = empty_model(spec, config, loaded_dtype(spec, config, read_headers(spec.folder, spec.revision)))
    model.requires_grad_(False)
    layout = find_layout(model)
    window = Window(DEFAULT_SINK, min(DEFAULT_RECENT, max(1, tokens - DEFAULT_SINK - 1)))
    try:
        substitutes = shorten(model, layout.blocks)
        calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        graph = inputs = 0
        with attention_implementation(model, MASKED), open_session(model.modules(), _Gated(window)):
            kept = _kept_calls(model, {layout.blocks[layer] for layer in substitutes}, calls)
            with kept, torch.no_grad(), FusedAttention(), Allocations(model):
                run_forward(model, meta_inputs(model, tokens))
            for block, args, kwargs in calls.values():
                hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
                inputs = max(inputs, hidden.nbytes)
                with torch.enable_grad(), FusedAttention(), Allocations(model) as used:
                    changed = kwargs if args else {**kwargs, "hidden_states": hidden}
                    out = block(*((hidden, *args[1:]) if args else ()), **changed)
                    out = out[0] if isinstance(out, tuple) else out
                    out.backward(torch.empty_like(out))
                graph = max(graph, used.peak)
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        raise UnsupportedModelError(
            f"the backward pass of {type(model).__name__} cannot be sized on the meta device: {typed_line(problem)}. "
            "Place a job without one, such as a scan"
        ) from problem
    of_sequence = (len(layout.blocks) + 4) * inputs + graph
    return -(-of_sequence * WITH_MARGIN // 100), _loss_bytes(model, tokens)


def _loss_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of the graph of a part of the losses: logits, and in float32 or wider
    their logarithms and derivatives."""
    vocabulary, itemsize = model.config.get_text_config().vocab_size, model.dtype.itemsize
    return min(tokens, max(16, LOGITS // vocabulary)) * vocabulary * (itemsize + 2 * max(4, itemsize))


@contextmanager
def _kept_calls(
    model: nn.Module, names: set[str], calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
) -> Iterator[None]:
    """Put the calls of some blocks in the next pass into ``calls``."""
    handles = []
    for name in names:

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            calls[name] = module, args, kwargs

        handles.append(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Gated:
    """A session that answers every call with gates between all keys and a window."""

    def __init__(self, window: Window) -> None:
        self._window, self._masks = window, MaskReader()

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall) or not torch.is_grad_enabled():
            return call.output()
        gate_BH11 = torch.full((1, call.num_attention_heads, 1, 1), 0.5, device=call.device, requires_grad=True)
        return gated_output(call, gate_BH11, self._window, self._masks)
