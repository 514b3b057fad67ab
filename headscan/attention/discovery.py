"""Discovery of a model's heads from one short forward pass.

The pass runs two equal sequences. In the second, one head is ablated at the attention itself; the projection whose
input lacks exactly that head is the output projection. A model that mixes its heads in between is therefore refused.
Passes with the model's own attention and with headscan's must then agree. If they do not, the model attends otherwise
under headscan's name: it keeps its own attention, whose operations are intercepted. If those disagree too, the
attention is of an unsupported kind, and the model is refused.
"""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import (
    IMPLEMENTATION,
    MASKED,
    PROBE,
    SESSIONS,
    Interceptor,
    attention_implementation,
    open_session,
    visited_attention,
    window_is_named,
)
from headscan.attention.small_copy import names_windows, small_copy
from headscan.errors import HeadscanError, InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.forward_inputs import batch_kwargs, input_device, real_tokens, run_forward
from headscan.models.model_facts import MODEL_ERRORS, raise_if_out_of_memory, typed_line
from headscan.text_tables import percent

_log = logging.getLogger("headscan")

#: Tokens of the probe, and of its encoder; the numbers must differ.
_TOKENS, _ENCODER_TOKENS = 4, 5
#: Tokens of a text that is longer than every window of a small copy.
_LONG = 80
#: Parameters of a model whose passes may take as long as a small copy of it.
_LARGE = 100_000_000


def discover(model: PreTrainedModel) -> HeadGrid:
    """Find every attention and its output projection.

    A long padded text is checked on a small copy of a model whose passes take time, or that has windows.
    """
    may_differ = model.num_parameters() > _LARGE or names_windows(model.config.to_dict())
    # The copy is first, because some models change when they read a short text.
    small = _found_small(model) if may_differ else None
    grid, unread = _found(model)
    if small is None:
        return _checked(model, grid, unread, _TOKENS, thorough=True)
    grid = _checked(model, grid, unread, _TOKENS, thorough=False)
    copied, small_grid, unread = small
    by_interface = any(site.by_interface for each in (grid, *grid.others) for site in each.sites)
    own = _intercepted(small_grid)
    agreed = _checked(copied, small_grid if by_interface else own, unread, _LONG, thorough=True)
    return _intercepted(grid) if agreed == own else grid


def _found_small(model: PreTrainedModel) -> tuple[PreTrainedModel, HeadGrid, tuple[str, ...]] | None:
    """Return a small copy of a model with what `_found` returns; None if it cannot be built, or is refused."""
    small = small_copy(model)
    if small is None:
        return None
    try:
        first_hidden = _long_hidden(small)
        grid, unread = _found(small)
        hidden = _long_hidden(small)
    except UnsupportedModelError as problem:
        _log.debug("a small copy of %s is not checked: %s", type(model).__name__, problem)
        return None
    if not torch.equal(hidden, first_hidden):
        raise UnsupportedModelError(
            f"{type(model).__name__} attends otherwise after it has read a short text. Load it with full attention in "
            "its configuration (`attention_type`), or another model"
        )
    return small, grid, unread


def _long_hidden(small: PreTrainedModel) -> Tensor:
    """Return the hidden states of a small copy for a text that is longer than its windows."""
    return _run(small, _probe_inputs(small, _LONG))


def _found(model: PreTrainedModel) -> tuple[HeadGrid, tuple[str, ...]]:
    """Return the grid of a model before it is checked, and the `unread_tensors` of its calls."""
    names = {module: name for name, module in model.named_modules()}
    if any(module in SESSIONS for module in names):
        raise InterventionError("heads cannot be discovered while a hook is open on the model. Close it first")
    probe = _Probe(names)
    with ExitStack() as cleanup:
        cleanup.enter_context(attention_implementation(model, PROBE))
        cleanup.enter_context(open_session(names, probe))
        for module in names:
            if _is_projection(module):
                cleanup.callback(module.register_forward_pre_hook(probe.projection_called).remove)
        interceptor = Interceptor(partial(probe.attend, by_interface=False), names, lambda *_: 2)
        cleanup.enter_context(interceptor)
        _run(model, _probe_inputs(model))
    probe.complain_if_open()
    if not probe.sites and (probe.saw_others or interceptor.seen_weights):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} cannot be seen as one weight for each pair of tokens: it is "
            "local, computed in parts or by einsum, or over more than the tokens. Load another model"
        )
    if not probe.sites:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no softmax attention heads. Load a model that has some"
        )
    return _grid(probe, model), probe.unread


def _run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the hidden states of a text."""
    try:
        with torch.no_grad():
            hidden: Tensor = run_forward(model, inputs)[0]
            return hidden
    except HeadscanError:
        raise
    except (*MODEL_ERRORS, ImportError) as problem:
        raise_if_out_of_memory(problem)
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on a short text: {typed_line(problem)}. Load another model"
        ) from problem


def _checked(
    model: PreTrainedModel, grid: HeadGrid, unread: tuple[str, ...], tokens: int, *, thorough: bool
) -> HeadGrid:
    """Return the grid under which headscan computes the attention of the model itself.

    Some models attend otherwise under an attention name that they do not know: they hand chosen keys to the attention
    function as ``unread`` tensors instead of masking the others, or need masks of one form. Their own attention runs
    while a hook is open, and its operations are intercepted.
    """
    own = _intercepted(grid)
    tried = [own] if unread else [grid] if own == grid else [grid, own]
    first_problem: UnsupportedModelError | None = None
    for each in tried:
        try:
            _check_outputs(model, each, tokens, thorough=thorough)
        except UnsupportedModelError as problem:
            first_problem = first_problem or problem
        else:
            return each
    assert first_problem is not None
    raise first_problem


def _intercepted(grid: HeadGrid) -> HeadGrid:
    """Return the grid with all attention calls intercepted."""
    sites = tuple(replace(site, by_interface=False) for site in grid.sites)
    return replace(grid, sites=sites, others=tuple(map(_intercepted, grid.others)))


def _check_outputs(model: PreTrainedModel, grid: HeadGrid, tokens: int, *, thorough: bool) -> None:
    """Raise if headscan's attention differs from the model's own; if ``thorough``, with all padding masks and at each
    kind of site alone, too.
    """
    grids = (grid, *grid.others)
    plain, masked = (_padded_inputs(model, grid, tokens, masks=masks) for masks in (False, True))
    passes = [(plain, grids)]
    if thorough and len(grids) > 1:
        passes += [(plain, (each,)) for each in grids]
    if thorough and masked.keys() != plain.keys():
        passes.append((masked, grids))
    own = _projected(model, grids, tokens, plain, ())
    for inputs, watched in passes:
        if inputs is masked:
            own = _projected(model, grids, tokens, masked, ())
        _compare(model, own, _projected(model, grids, tokens, inputs, watched))


def _compare(model: PreTrainedModel, own: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    """Raise if the inputs of a projection differ."""
    exact = model.dtype in (torch.float32, torch.float64)
    for place, (name, expected) in enumerate(own.items()):
        error = (outputs[name] - expected).norm() / expected.norm().clamp_min(1e-12)
        # In half precision the two round differently. The differences grow over the layers, and one can send a token to
        # another expert, so only the first layer has a tight bound.
        bound = 1e-3 if exact else 0.25 if place else 4 * torch.finfo(model.dtype).eps
        if error > bound or (error.isnan() and expected.isfinite().all()):
            raise UnsupportedModelError(
                f"{type(model).__name__} has an unsupported kind of attention: the input of {name} "
                f"differs by {percent(float(error))} (limit {percent(bound)}) from softmax attention. Load another "
                "model"
            )


def _projected(
    model: PreTrainedModel,
    grids: tuple[HeadGrid, ...],
    tokens: int,
    inputs: dict[str, Tensor],
    watched: tuple[HeadGrid, ...],
) -> dict[str, Tensor]:
    """Return the real tokens of the input of each projection, float32, by name, in order of the calls, while the
    attention of ``watched`` grids is headscan's. Raise if an attention call of theirs is not seen exactly once.
    """
    given: dict[str, Tensor] = {}
    calls: list[tuple[str, int, int]] = []

    def keep(kind: str, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        real = real_tokens(*_lengths(kind, tokens)).to(args[0].device)
        given[name] = args[0].detach().reshape(*real.shape, -1)[real].float()

    def count(site: AttentionSite, call: AttentionCall) -> None:
        calls.append((site.path, call.num_attention_heads, call.value_dim))

    with ExitStack() as cleanup:
        for grid in grids:
            for site in grid.sites:
                projection = model.get_submodule(site.output_projection)
                hook = partial(keep, grid.kind, site.output_projection)
                cleanup.callback(projection.register_forward_pre_hook(hook).remove)
        for grid in watched:
            cleanup.enter_context(visited_attention(model, grid, count))
        _run(model, inputs)
    for site in (site for grid in watched for site in grid.sites):
        if calls.count((site.path, site.num_attention_heads, site.value_dim)) != 1:
            own = model.config._attn_implementation
            raise UnsupportedModelError(
                f"the attention of {site.path} cannot be seen under `attn_implementation={own!r}`. Load the model with "
                "`attn_implementation='sdpa'` or 'eager', or another model"
            )
    return given


def _vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids; raise if the model reads none."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if size is None or not hasattr(model.get_input_embeddings(), "weight"):
        raise UnsupportedModelError(f"{type(model).__name__} embeds no token ids. Load another model")
    return int(size)


def _probe_inputs(model: PreTrainedModel, tokens: int = _TOKENS) -> dict[str, Tensor]:
    """Return two equal sequences."""
    vocabulary = _vocabulary(model)
    # Skip the first ids, which include padding: some models derive positions from it.
    ids = (torch.arange(tokens + _ENCODER_TOKENS - _TOKENS, device=input_device(model)) + 5).expand(2, -1) % vocabulary
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :tokens]}
    return {"input_ids": ids[:, :tokens]}


def _lengths(kind: str, tokens: int) -> tuple[Tensor, int]:
    """Return the lengths (2,) of a padded text at a kind of site, and its width."""
    width = tokens + (_ENCODER_TOKENS - _TOKENS) * (kind == "encoder")
    return torch.tensor([width, width // 2]), width


def _padded_inputs(model: PreTrainedModel, grid: HeadGrid, tokens: int, *, masks: bool) -> dict[str, Tensor]:
    """Return two sequences of which the second is padded on the right, with all padding masks, or with those alone that
    `batch_kwargs` gives.
    """
    device, vocabulary = input_device(model), _vocabulary(model)
    both = model.config.is_encoder_decoder
    lengths, width = _lengths("encoder" if both else "self", tokens)
    # Ids that repeat late: a text of equal tokens would hide which keys a query sees.
    ids = ((torch.arange(2 * width, device=device) * 7 % 61) + 5).reshape(2, width) % vocabulary
    decoder_ids = ids[:, :tokens] if both else None
    causal = not both and not masks and grid.predicts_next_token
    inputs = batch_kwargs(ids, lengths.to(device), causal=causal, decoder_input_ids=decoder_ids)
    if both and masks:
        inputs["decoder_attention_mask"] = real_tokens(*_lengths("self", tokens)).long().to(device)
    return inputs


def _is_projection(module: nn.Module) -> bool:
    """Return True if a module multiplies by its own matrix (Linear, Conv1D and quantised versions of them)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


class _Probe:
    """A session that records attention calls and the projection of each."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.sites: list[AttentionSite] = []
        self.named_windows = True
        #: Names of tensors that an attention function of headscan does not read.
        self.unread: tuple[str, ...] = ()
        #: True if there was attention over other than the tokens.
        self.saw_others = False
        #: An attention call whose projection has not run yet: module, call, ablated head, by interface.
        self._open: tuple[nn.Module, AttentionCall, int, bool] | None = None
        self._mixed = False
        #: Keys, or None if the calls do not show them, and values of earlier layers.
        self._key_values: dict[int, tuple[Tensor | None, Tensor]] = {}

    def attend(self, module: nn.Module, call: AttentionCall, *, by_interface: bool = True) -> Tensor:
        """Answer a call of the attention interface, or of the interceptor."""
        cross = call.geometry.queries != call.geometry.keys
        call = call.placed(causal=call.geometry.causal and not cross, cross=cross)
        out = call.output()
        if call.geometry.queries not in (_TOKENS, _ENCODER_TOKENS) or len(out) != 2:
            self.saw_others = True
            return out  # not over tokens, but over image patches, states or experts
        self.complain_if_open()
        if not cross:
            # Read causality from the weights, because a mask can restrict more than the module declares.
            weights = call.weights(torch.arange(call.geometry.queries, device=call.device).expand(2, -1))
            call = call.placed(causal=not bool((weights.triu(1) > 0).any()), cross=False)
        # Ablate the head with the largest output: ablating a zero output would show nothing.
        head = int(out[0].float().norm(dim=(1, 2)).argmax())
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
        # The layers above need two equal sequences again.
        return (torch.stack([whole, whole]).reshape(args[0].shape), *args[1:])

    def complain_if_open(self) -> None:
        """Raise if no projection takes the output of the open attention call."""
        if self._open is None:
            return
        name = self.names[self._open[0]]
        if self._mixed:
            raise UnsupportedModelError(
                f"something mixes the heads of {name} before their projection (a normalisation over all heads, say), "
                "so they cannot be ablated one by one. Load another model"
            )
        raise UnsupportedModelError(
            f"no projection takes the outputs of the heads of {name} unchanged, so they cannot be ablated one by one. "
            "Load another model"
        )

    def _add(self, module: nn.Module, call: AttentionCall, projection: nn.Module, by_interface: bool) -> None:
        path = self.names[module]
        if any(site.path == path for site in self.sites):
            raise UnsupportedModelError(
                f"{path} serves several layers, so their heads cannot be ablated one by one. Load another model"
            )
        if by_interface and isinstance(call, ScoredCall):
            self.named_windows &= window_is_named(call)
            self.unread = self.unread or call.unread
        merged = call.geometry.keys == _TOKENS + _ENCODER_TOKENS
        cross = "merged" if merged else "cross"
        own = "encoder" if call.geometry.queries == _ENCODER_TOKENS else "self"
        kind = cross if call.geometry.cross else own
        layer = _layer(path, module, sum(site.kind == kind for site in self.sites))
        heads = getattr(module, "headscan_heads", None)
        # Where groups differ in size, the call shows each key once per query head, and the module holds the index.
        index = None if heads is None or heads.groups_are_equal else heads.kv_index
        self.sites.append(
            AttentionSite(
                kind=kind,
                layer=layer,
                path=path,
                output_projection=self.names[projection],
                num_attention_heads=call.num_attention_heads,
                num_key_value_heads=_key_value_heads(call) if index is None else max(index) + 1,
                head_dim=call.head_dim,
                value_dim=call.value_dim,
                sliding_window=call.sliding_window,
                causal=call.geometry.causal,
                by_interface=by_interface,
                kv_shared_from=self._shared_from(layer, call) if kind == "self" else None,
                kv_index=index,
            )
        )

    def _shared_from(self, layer: int, call: AttentionCall) -> int | None:
        """Return the earlier layer with the same keys and values, or None."""
        key = call.key_BKSD.cpu() if isinstance(call, ScoredCall) else None
        value = call.value_BKSD.cpu()
        for earlier, (its_key, its_value) in self._key_values.items():
            same_keys = key is None or its_key is None or torch.equal(key, its_key)
            if same_keys and torch.equal(value, its_value) and value.any():
                return earlier
        self._key_values[layer] = key, value
        return None


def _grid(probe: _Probe, model: PreTrainedModel) -> HeadGrid:
    """Return the sites in order, decoder self-attention first."""
    grids: list[HeadGrid] = []
    for kind in ("self", "merged", "encoder", "cross"):
        sites = sorted((site for site in probe.sites if site.kind == kind), key=lambda site: site.layer)
        if not sites:
            continue
        for below, above in pairwise(sites):
            if below.layer == above.layer:
                raise UnsupportedModelError(
                    f"layer {below.layer} has two attentions (limit 1): {below.path}, {above.path}. Load another model"
                )
        layers = sites[-1].layer + 1
        if not model.config.is_encoder_decoder:
            layers = max(layers, int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)))
        grids.append(HeadGrid(tuple(sites), layers, IMPLEMENTATION if probe.named_windows else MASKED))
    if model.config.is_encoder_decoder and not any(grid.kind == "encoder" for grid in grids):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__}'s encoder cannot be seen: it is local, or computed in parts. "
            "Load another model"
        )
    return replace(grids[0], others=tuple(grids[1:]))


def _key_value_heads(call: AttentionCall) -> int:
    """Return the number of KV heads, without the copies for query heads."""
    heads = call.key_BKSD if isinstance(call, ScoredCall) else call.value_BKSD
    for count in range(1, heads.shape[1]):
        if heads.shape[1] % count == 0:
            groups = heads.unflatten(1, (count, -1))
            if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
                return count
    return heads.shape[1]


def _layer(path: str, module: nn.Module, count: int) -> int:
    """Return a layer's index: the first number in the module's path, its own index, or the order of the calls."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(numbers[0]) if numbers else int(getattr(module, "layer_idx", None) or count)
