"""The two hooks on a model's heads, as reversible context managers.

The *attention hook* shows query, key and value of every layer. The *output hook* shows, and can replace, every head's
output at the input of the output projection. Both can be nested, and both are removed on any exception.

The attention function is registered with transformers at its first use, and a model uses it while a hook is open.
`SESSIONS` holds the session of each attention module, so models do not affect each other. The function
has three names, which differ in their masks. Under `IMPLEMENTATION` a sliding window needs no N x N mask, because the
call passes ``sliding_window``, as for FlashAttention. Under `MASKED` the mask encodes the window, for models whose
calls do not pass it. Discovery decides between the two under the third name, `PROBE`.

A model that does not use this interface calls either ``scaled_dot_product_attention``, which shows query, key and
value, or a softmax whose result it multiplies with the values, which shows the weights. `Interceptor`, a torch
function mode, sees both while it is entered; the model itself is not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from headscan.attention.calls import AttentionCall, AttentionSession, ScoredCall, WeightsCall
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.forward_inputs import without_autocast
from headscan.models.loaded_model import LoadedModel, StandIn, attention_functions

_log = logging.getLogger("headscan")

IMPLEMENTATION, MASKED, PROBE = "headscan", "headscan-masked", "headscan-probe"
#: The session that answers the calls of an attention module, while a hook is open on it.
SESSIONS: WeakKeyDictionary[nn.Module, AttentionSession] = WeakKeyDictionary()
#: The window that the model requested, by mask made for `PROBE`; keyed by identity, since tensors compare by element.
_WINDOWS = WeakIdKeyDictionary()


@contextmanager
def open_session(modules: Iterable[nn.Module], session: AttentionSession) -> Iterator[None]:
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
    """Set the attention implementation of a model; restore it on exit. Models inside the model are set, too."""
    _register()
    configs = {
        id(module.config): module.config
        for module in _modules(model)
        if isinstance(module, PreTrainedModel) and module._can_set_attn_implementation()
    }
    previous = [(config, config._attn_implementation) for config in configs.values()]
    try:
        # `set_attn_implementation` would warn about models without one, and lose the implementation of each model.
        for config, _ in previous:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in previous:
            config._attn_implementation_internal = implementation


def _register() -> None:
    """Register the three names with transformers, once."""
    if IMPLEMENTATION not in AttentionInterface():
        for name, mask in ((IMPLEMENTATION, _unwindowed_mask), (MASKED, sdpa_mask), (PROBE, _probe_mask)):
            AttentionInterface.register(name, _attention_function)
            AttentionMaskInterface.register(name, mask)


def window_is_named(call: ScoredCall) -> bool:
    """Return True if a `PROBE` call passes the window of its mask."""
    return call.mask is None or _WINDOWS.get(call.mask, "not made by `_probe_mask`") == call.sliding_window


def _unwindowed_mask(
    *, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Return None if attention is plainly causal, with or without a window."""
    mask_window = None if allow_is_causal_skip else local_size
    return sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, local_size=mask_window, **kwargs)


def _probe_mask(*, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    mask = sdpa_mask(allow_is_causal_skip=False, local_size=local_size, **kwargs)
    if mask is not None:
        _WINDOWS[mask] = local_size
    return mask


def _attention_function(
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
    """Pass a module's attention call to the session of the module; transformers gives these arguments."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
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
        sinks_BHN=learned_sinks(s_aux, sinks),
        sliding_window=sliding_window,
        unread=unread_tensors(kwargs),
    )
    session = SESSIONS.get(module)
    if session is not None:
        out = session.attend(module, call)
    else:  # no hook is open on this attention: another kind of site, or a part that reads no tokens
        refuse_unread(call.unread)
        cross = query.shape[2] != key.shape[2]
        out = call.placed(causal=call.causal and not cross, cross=cross).output()
    return out.transpose(1, 2).contiguous(), None


def learned_sinks(s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    """Return logits (1 or B, H, 1 or N) of one per head (gpt-oss and similar models) or one per query (B, H, N, 1)."""
    if s_aux is not None:
        return s_aux.view(1, -1, 1)
    return None if sinks is None else sinks.squeeze(-1)


#: Tensors that models pass to every attention function, and that change nothing under a mask.
_WITHOUT_EFFECT = frozenset(
    {
        "attention_mask",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "position_ids",
    }
)


def unread_tensors(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of tensors, among the arguments of an attention function that it does not read, that may change
    the attention, such as the indices of chosen keys.
    """
    return tuple(name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _WITHOUT_EFFECT)


def refuse_unread(names: tuple[str, ...]) -> None:
    """Raise if there are `unread_tensors`."""
    if names:
        raise UnsupportedModelError(
            f"the model passes {', '.join(names)} to its attention (limit: query, key, value, mask, position bias and "
            "learned sinks), which headscan does not read. Load another model"
        )


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
    Tensor.__getitem__,  # leaves out a learned sink
    torch.masked_fill,
    F.dropout,
    torch.dropout,
}


class Interceptor(TorchFunctionMode):
    """A function mode that passes attention calls inside ``modules`` to ``attend``; a call belongs to the innermost
    one. ``sequences`` returns the number of sequences in a number of (sequence x head) rows of a module.
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
        #: True once a module has computed a softmax with the dimensions of attention weights.
        self.seen_weights = False
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
            self.seen_weights |= out.ndim >= 4
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
    if attn_mask is not None:
        corner = attn_mask[..., 0, -1]
        seen = corner if attn_mask.dtype == torch.bool else corner > torch.finfo(attn_mask.dtype).min / 2
        is_causal = attn_mask.shape[-1] > 1 and not bool(seen.any())
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return ScoredCall(query, key, value, scale, causal=is_causal, mask=attn_mask)


#: Called with a site and its attention call; returns the heads' outputs (B, H, N, Dv) if it had to compute them anyway.
AttentionVisitor = Callable[[AttentionSite, AttentionCall], Tensor | None]
#: Called with a site and its heads' outputs (B, N, H, Dv); returns their replacement, or None for no change.
OutputVisitor = Callable[[AttentionSite, Tensor], Tensor | None]


class _VisitorSession:
    """The session of an attention hook, which shows each layer's attention to every visitor. ``ran`` receives the paths
    of the sites that were called.
    """

    def __init__(self, sites: dict[nn.Module, AttentionSite], ran: set[str]) -> None:
        self.sites, self._ran = sites, ran
        self.visitors: list[AttentionVisitor] = []

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        site = self.sites[module]
        self._ran.add(site.path)
        refuse_training(module)
        if isinstance(call, ScoredCall):
            refuse_unread(call.unread)
        call = call.placed(causal=site.causal, cross=site.kind in ("cross", "merged"))
        with without_autocast(call.device):
            outputs = [visitor(site, call) for visitor in self.visitors]
            computed = [output for output in outputs if output is not None]
            return computed[-1] if computed else call.output()

    def sequences(self, module: nn.Module, rows: int) -> int:
        return rows // self.sites[module].num_attention_heads


def refuse_compiled(lm: LoadedModel) -> None:
    """Raise if any module of a model is compiled. Compiled modules run without hooks."""
    for name, module in lm.model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
            raise UnsupportedModelError(
                f"{name or 'the model'} is compiled, and compiled modules run without hooks. Load the model again, and "
                "compile it after its heads are measured or ablated"
            )


def _refuse_other_attention(lm: LoadedModel) -> None:
    """Raise if a model uses an attention function that was not checked when it was loaded. All functions of
    transformers and headscan compute the same.
    """
    for name, function in attention_functions(lm.model) - lm.attention:
        if name != "eager" and not function.startswith(("transformers.", "headscan.")):
            loaded = ", ".join(sorted(name for name, _ in lm.attention))
            raise UnsupportedModelError(
                f"the model attends by {name!r} now, and attended by {loaded!r} when it was loaded. Pass it to "
                "`headscan.load` again, which checks its attention"
            )


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model. `nn.Module.modules` composes names, which takes milliseconds of every pass."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        if (module := waiting.pop()) is not None:
            yield module
            waiting += module._modules.values()


def refuse_training(model: nn.Module) -> None:
    """Raise if any module of a model is in train mode. Dropout would change its numbers."""
    if not any(module.training for module in _modules(model)):
        return
    name, module = next((name, module) for name, module in model.named_modules() if module.training)
    raise UnsupportedModelError(
        f"{name or type(module).__name__} is in train mode, and dropout would change the numbers. Call "
        "lm.model.eval() first"
    )


@contextmanager
def watched_passes(
    model: PreTrainedModel, begin: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None], end: Callable[[], None]
) -> Iterator[None]:
    """Call ``begin`` before each pass of a model, with its module and arguments, and ``end`` after it unless it fails.
    Neither runs in passes inside a pass.
    """
    running: nn.Module | None = None

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal running
        if running is None:
            running = module
            begin(module, args, kwargs)

    def ended(module: nn.Module, *_: Any) -> None:
        if module is running:
            end()

    def left(module: nn.Module, *_: Any) -> None:
        nonlocal running
        if module is running:
            running = None

    with ExitStack() as hooks:
        # Callers may run the base model directly, and some heads call an inner part of the model themselves.
        for module in {model, model.base_model}:
            hooks.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(ended).remove)
            hooks.callback(module.register_forward_hook(left, always_call=True).remove)
        yield


@contextmanager
def _checked_passes(model: PreTrainedModel, grid: HeadGrid, paths: Iterable[str]) -> Iterator[set[str]]:
    """Yield a set to which the hooks of the modules ``paths``, one a site, add their path when they run. Raise at the
    end of a pass in which some did not: compiled, traced and replaced forwards skip the hooks of the modules inside.
    """
    expected = frozenset(paths)
    ran: set[str] = set()
    seen, reads_text = False, True

    def begin(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal seen, reads_text
        seen = True
        ran.clear()
        # `generate` runs the encoder once, by itself, and hands its output to every pass.
        reads_text = grid.kind != "encoder" or kwargs.get("encoder_outputs") is None

    def end() -> None:
        if len(ran) < len(expected) and reads_text:
            skipped = sorted(path for path in expected - ran if not _is_left_out(model, path))
            if skipped:
                raise UnsupportedModelError(
                    f"{skipped[0]} ran without its hook ({len(skipped)} of {len(expected)} layers): its forward, or "
                    "that of a module around it, is compiled, traced or replaced. Load the model again, and compile it "
                    "after its heads are measured or ablated"
                )

    with watched_passes(model, begin, end):
        yield ran
    if not (seen or ran):
        _log.warning(
            "no pass of %s ran while a hook was open on it: traced, exported and captured copies have no hooks",
            type(model).__name__,
        )


def _is_left_out(model: PreTrainedModel, path: str) -> bool:
    """Return True if a pass does not run a module on purpose: headscan replaced a block around it, or the configuration
    has fewer layers now, as while `generate` drafts tokens with the first ones.
    """
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    module: Any = model
    for name in path.split("."):
        if isinstance(module, nn.ModuleList) and isinstance(layers, int) and int(name) >= layers:
            return True
        module = getattr(module, name)
        if isinstance(vars(module).get("forward"), StandIn):
            return True
    return False


@contextmanager
def attention_hook(lm: LoadedModel, visitor: AttentionVisitor) -> Iterator[None]:
    """Show every attention call to ``visitor``, in addition to others; only one thread may use hooks on a model."""
    refuse_compiled(lm)
    refuse_training(lm.model)
    _refuse_other_attention(lm)
    with visited_attention(lm.model, lm.grid, visitor):
        yield


@contextmanager
def visited_attention(model: PreTrainedModel, grid: HeadGrid, visitor: AttentionVisitor) -> Iterator[None]:
    """Show every attention call to ``visitor``. Use `attention_hook` for a loaded model; discovery calls this
    before there is a `LoadedModel`.
    """
    if not grid.sites:
        yield  # some layers of a hybrid
        return
    sites = {model.get_submodule(site.path): site for site in grid.sites}
    session = SESSIONS.get(next(iter(sites)))
    assert session is None or isinstance(session, _VisitorSession)
    with ExitStack() as cleanup:
        if session is None:
            ran = cleanup.enter_context(_checked_passes(model, grid, [site.path for site in grid.sites]))
            session = _VisitorSession(sites, ran)
            cleanup.enter_context(open_session(sites, session))
            if any(site.by_interface for site in grid.sites):
                cleanup.enter_context(attention_implementation(model, grid.implementation))
            intercepted = [module for module, site in sites.items() if not site.by_interface]
            if intercepted:
                cleanup.enter_context(Interceptor(session.attend, intercepted, session.sequences))
        session.visitors.append(visitor)
        cleanup.callback(session.visitors.remove, visitor)
        yield


@contextmanager
def output_hook(lm: LoadedModel, visit: OutputVisitor) -> Iterator[None]:
    """Let ``visit`` read and replace the heads' outputs of every layer. Later hooks see earlier replacements."""
    refuse_compiled(lm)
    refuse_training(lm.model)

    def hook(site: AttentionSite, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        ran.add(site.output_projection)
        refuse_training(projection)
        outputs_BNHD = args[0].unflatten(-1, (site.num_attention_heads, site.value_dim))
        with without_autocast(outputs_BNHD.device):
            replacement_BNHD = visit(site, outputs_BNHD)
        return None if replacement_BNHD is None else (replacement_BNHD.flatten(-2), *args[1:])

    projections = [site.output_projection for site in lm.grid.sites]
    with _checked_passes(lm.model, lm.grid, projections) as ran, ExitStack() as cleanup:
        for site in lm.grid.sites:
            projection = lm.module(site.output_projection)
            cleanup.callback(projection.register_forward_pre_hook(partial(hook, site)).remove)
        yield
