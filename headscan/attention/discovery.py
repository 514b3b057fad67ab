"""Finding the heads of a loaded model by watching one short forward pass, not by a list of names.

The pass runs two equal sequences. In the second, one head is ablated at the attention itself; the projection whose
input lacks just that head is the output projection. So a model is taken only if a head ablated at one hook is the head
ablated at the other, and one that mixes its heads in between is refused. Two more passes, one with the model's own
attention and one with the instrument's, tell whether they give the same: a model whose attention is of an unknown kind
is refused, too.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import watched_attention
from headscan.attention.interception import Interceptor
from headscan.attention.interface import (
    IMPLEMENTATION,
    MASKED,
    PROBE,
    SESSIONS,
    attention_implementation,
    open_session,
    window_is_named,
)
from headscan.errors import HeadscanError, InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.forward_inputs import input_device, run

#: Tokens of the probe, and of its encoder, which must be another number.
_TOKENS, _ENCODER_TOKENS = 4, 5


def discover(model: PreTrainedModel) -> HeadGrid:
    """Find every attention and its output projection.

    Raises:
        UnsupportedModelError: There are no heads, what one head gives cannot be told from the others, or the attention
            is of a kind that is not understood.
        InterventionError: The model's heads are being looked at.
    """
    names = {module: name for name, module in model.named_modules()}
    if any(module in SESSIONS for module in names):
        raise InterventionError("the model's heads are being looked at: find them before opening a context on it")
    probe = _Probe(names)
    with ExitStack() as cleanup:
        cleanup.enter_context(attention_implementation(model, PROBE))
        cleanup.enter_context(open_session(names, probe))
        for module in names:
            if _is_projection(module):
                cleanup.callback(module.register_forward_pre_hook(probe.projection_called).remove)
        cleanup.enter_context(Interceptor(probe.intercepted, names, lambda *_: 2))
        _read_probe(model)
    probe.complain_if_open()
    if not probe.sites:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no softmax attention heads: there is nothing to measure"
        )
    grid = _grid(probe, model)
    _check_outputs(model, grid, [site.output_projection for site in probe.sites])
    return grid


def _read_probe(model: PreTrainedModel) -> None:
    try:
        with torch.no_grad():
            run(model, _probe_inputs(model))
    except HeadscanError:
        raise
    except Exception as problem:
        line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise UnsupportedModelError(f"{type(model).__name__} cannot read a short text: {line}") from problem


def _check_outputs(model: PreTrainedModel, grid: HeadGrid, projections: list[str]) -> None:
    """Refuse a model whose own attention hands other outputs to a projection than the instrument's does.

    Raises:
        UnsupportedModelError: Something about its attention is not understood.
    """
    own = _projected(model, projections)
    with ExitStack() as hooks:
        for seen in (grid, *grid.others):
            hooks.enter_context(watched_attention(model, seen, lambda *_: None))
        found = _projected(model, projections)
    exact = model.dtype in (torch.float32, torch.float64)
    for place, name in enumerate(projections):
        error = (found[name] - own[name]).norm() / own[name].norm().clamp_min(1e-12)
        # Half precision rounds differently what is computed differently. That adds up over the layers, and a rounding
        # may send a token to another expert, so only the first layer is looked at closely.
        bound = 1e-3 if exact else 0.25 if place else 4 * torch.finfo(model.dtype).eps
        if error > bound:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes its attention in a way that is not understood: what reaches {name} "
                f"differs by {float(error):.1%} from attention as its arguments say"
            )


def _projected(model: PreTrainedModel, projections: list[str]) -> dict[str, Tensor]:
    """What each projection is given of the probe, flat, float32."""
    given: dict[str, Tensor] = {}
    with ExitStack() as cleanup:
        for name in projections:

            def keep(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                given[name] = args[0].detach().flatten().float()

            cleanup.callback(model.get_submodule(name).register_forward_pre_hook(keep).remove)
        _read_probe(model)
    return given


def _probe_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    # Past the first ids, among which padding is: some models number positions by it.
    ids = (torch.arange(_ENCODER_TOKENS, device=input_device(model)) + 5).expand(2, -1) % vocabulary
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :_TOKENS]}
    return {"input_ids": ids[:, :_TOKENS]}


def _is_projection(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix of its own (Linear, Conv1D and their quantised kin)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


class _Probe:
    """Writes down attention calls, and which projection takes their output."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.sites: list[AttentionSite] = []
        self.named_windows = True
        #: An attention whose projection is still to come: its module, the call, the ablated head, who showed it.
        self._open: tuple[nn.Module, AttentionCall, int, bool] | None = None
        self._mixed = False
        #: Keys, where they are seen, and values of the layers so far.
        self._key_values: dict[int, tuple[Tensor | None, Tensor]] = {}

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """A call by the attention interface."""
        return self._attend(module, call, by_interface=True)

    def intercepted(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """A call that the interceptor saw."""
        return self._attend(module, call, by_interface=False)

    def _attend(self, module: nn.Module, call: AttentionCall, *, by_interface: bool) -> Tensor:
        cross = call.geometry.queries != call.geometry.keys
        call = call.placed(causal=call.geometry.causal and not cross, cross=cross)
        out = call.output()
        if call.geometry.queries not in (_TOKENS, _ENCODER_TOKENS) or len(out) != 2:
            return out  # of something else than tokens: image patches, states, experts
        self.complain_if_open()
        if not cross:
            # Seen, and not believed: a mask may say more than the module does.
            weights = call.weights(torch.arange(call.geometry.queries, device=call.device).expand(2, -1))
            call = call.placed(causal=not bool((weights.triu(1) > 0).any()), cross=False)
        head = int(out[0].float().norm(dim=(1, 2)).argmax())  # the loudest: a head that is silent anyway tells nothing
        self._open, self._mixed = (module, call, head, by_interface), False
        out = out.clone()
        out[1, head] = 0.0
        return out

    def projection_called(self, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._open is None or not args or not isinstance(args[0], Tensor):
            return None
        module, call, head, by_interface = self._open
        heads, width = call.num_attention_heads, call.value_dim
        if args[0].shape[-1] != heads * width or args[0].numel() != 2 * call.geometry.queries * heads * width:
            return None
        whole, ablated = args[0].reshape(2, -1, heads, width)
        if ablated[:, head].any() or not whole[:, head].any():
            return None
        others = [other for other in range(heads) if other != head]
        if not torch.allclose(
            ablated[:, others].float(), whole[:, others].float(), rtol=1e-2, atol=1e-5, equal_nan=True
        ):
            self._mixed = True
            return None
        self._add(module, call, projection, by_interface)
        self._open = None
        # What lies above is to see two equal sequences again.
        return (torch.stack([whole, whole]).reshape(args[0].shape), *args[1:])

    def complain_if_open(self) -> None:
        """Refuse a model one of whose attentions no projection takes the output of."""
        if self._open is None:
            return
        name = self.names[self._open[0]]
        if self._mixed:
            raise UnsupportedModelError(
                f"between the heads of {name} and their projection something mixes them (a normalisation over all "
                "heads, say): a head cannot be ablated without changing the others"
            )
        raise UnsupportedModelError(
            f"no projection takes the output of the heads of {name} as it is: they cannot be ablated one by one"
        )

    def _add(self, module: nn.Module, call: AttentionCall, projection: nn.Module, by_interface: bool) -> None:
        path = self.names[module]
        if any(site.path == path for site in self.sites):
            raise UnsupportedModelError(f"{path} serves several layers, whose heads cannot be told apart")
        if by_interface and isinstance(call, ScoredCall):
            self.named_windows &= window_is_named(call)
        kind = "cross" if call.geometry.cross else "encoder" if call.geometry.queries == _ENCODER_TOKENS else "self"
        layer = _layer(path, module, sum(site.site == kind for site in self.sites))
        self.sites.append(
            AttentionSite(
                site=kind,
                layer=layer,
                path=path,
                output_projection=self.names[projection],
                num_attention_heads=call.num_attention_heads,
                num_key_value_heads=_key_value_heads(call),
                head_dim=call.head_dim,
                value_dim=call.value_dim,
                sliding_window=call.sliding_window,
                causal=call.geometry.causal,
                by_interface=by_interface,
                kv_shared_from=self._shared_from(layer, call) if kind == "self" else None,
            )
        )

    def _shared_from(self, layer: int, call: AttentionCall) -> int | None:
        """The earlier layer with the very same keys and values: its own would be of other hidden states."""
        key = call.key_BKSD.cpu() if isinstance(call, ScoredCall) else None
        value = call.value_BKSD.cpu()
        for earlier, (its_key, its_value) in self._key_values.items():
            same_keys = key is None or its_key is None or torch.equal(key, its_key)
            if same_keys and torch.equal(value, its_value) and value.any():
                return earlier
        self._key_values[layer] = key, value
        return None


def _grid(probe: _Probe, model: PreTrainedModel) -> HeadGrid:
    """The sites in order, decoder self-attention first."""
    grids: list[HeadGrid] = []
    for kind in ("self", "encoder", "cross"):
        sites = sorted((site for site in probe.sites if site.site == kind), key=lambda site: site.layer)
        if not sites:
            continue
        for below, above in pairwise(sites):
            if below.layer == above.layer:
                raise UnsupportedModelError(
                    f"layer {below.layer} has two attentions, {below.path} and {above.path}: heads cannot be numbered"
                )
        layers = sites[-1].layer + 1
        if not model.config.is_encoder_decoder:
            layers = max(layers, int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)))
        grids.append(HeadGrid(tuple(sites), layers, IMPLEMENTATION if probe.named_windows else MASKED))
    if model.config.is_encoder_decoder and not any(grid.kind == "encoder" for grid in grids):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__}'s encoder cannot be seen: it is local, or computed in parts"
        )
    return replace(grids[0], others=tuple(grids[1:]))


def _key_value_heads(call: AttentionCall) -> int:
    """KV heads of a call; a model that repeats them for its query heads shows copies, which count once."""
    heads = call.key_BKSD if isinstance(call, ScoredCall) else call.value_BKSD
    for count in range(1, heads.shape[1]):
        if heads.shape[1] % count == 0:
            groups = heads.unflatten(1, (count, -1))
            if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
                return count
    return heads.shape[1]


def _layer(path: str, module: nn.Module, count: int) -> int:
    """A layer's index: the first number in its path, or what the module says, or the order of the calls."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(numbers[0]) if numbers else int(getattr(module, "layer_idx", None) or count)
