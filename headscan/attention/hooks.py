"""The two hooks on a model's heads, as reversible context managers.

The *attention hook* shows query, key and value of every layer. The *output hook* shows, and can replace, every head's
output at the input of the output projection. Both can be nested, and both are removed on any exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headscan.attention.calls import AttentionCall
from headscan.attention.interface import SESSIONS, Interceptor, attention_implementation, open_session
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.forward_inputs import without_autocast
from headscan.models.loaded_model import LoadedModel

#: Called with a site and its attention call; returns the heads' outputs (B, H, N, Dv) if it had to compute them anyway.
AttentionObserver = Callable[[AttentionSite, AttentionCall], Tensor | None]
#: Called with a site and its heads' outputs (B, N, H, Dv); returns their replacement, or None for no change.
OutputVisitor = Callable[[AttentionSite, Tensor], Tensor | None]


class _Dispatch:
    """A session that shows a layer's attention to every observer."""

    def __init__(self, sites: dict[nn.Module, AttentionSite]) -> None:
        self.sites = sites
        self.observers: list[AttentionObserver] = []

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        site = self.sites[module]
        refuse_training(module)
        call = call.placed(causal=site.causal, cross=site.site == "cross")
        with without_autocast(call.device):
            outs = [out for observer in self.observers if (out := observer(site, call)) is not None]
            return outs[-1] if outs else call.output()

    def sequences(self, module: nn.Module, rows: int) -> int:
        return rows // self.sites[module].num_attention_heads


def refuse_compiled(lm: LoadedModel) -> None:
    """Raise if any module of a model is compiled.

    Compiled modules run without hooks.

    Raises:
        UnsupportedModelError: The model, or a part of it, is compiled.
    """
    for name, module in lm.model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
            raise UnsupportedModelError(
                f"{name or 'the model'} is compiled, and compiled modules run without hooks. Load the model again, and "
                "compile it after its heads are measured or ablated"
            )


def refuse_training(model: nn.Module) -> None:
    """Raise if any module of a model is in train mode.

    Dropout would change its numbers.

    Raises:
        UnsupportedModelError: It is.
    """
    for name, module in model.named_modules():
        if module.training:
            raise UnsupportedModelError(
                f"{name or type(module).__name__} is in train mode, and dropout would change the numbers. Call "
                "lm.model.eval() first"
            )


@contextmanager
def attention_hook(lm: LoadedModel, observer: AttentionObserver) -> Iterator[None]:
    """Show every attention call of the model to ``observer``.

    A hook opened inside another adds its observer.

    Only one thread at a time may use hooks on a model.

    Raises:
        UnsupportedModelError: The model is compiled or in train mode.
    """
    refuse_compiled(lm)
    refuse_training(lm.model)
    with watched_attention(lm.model, lm.grid, observer):
        yield


@contextmanager
def watched_attention(model: PreTrainedModel, grid: HeadGrid, observer: AttentionObserver) -> Iterator[None]:
    """`attention_hook` of a model that is not loaded yet."""
    if not grid.sites:
        yield  # some layers of a hybrid
        return
    modules = {model.get_submodule(site.path): site for site in grid.sites}
    dispatch = SESSIONS.get(next(iter(modules)))
    assert dispatch is None or isinstance(dispatch, _Dispatch)
    with ExitStack() as cleanup:
        if dispatch is None:
            dispatch = _Dispatch(modules)
            by_interface = [module for module, site in modules.items() if site.by_interface]
            watched = [module for module, site in modules.items() if not site.by_interface]
            if by_interface:
                cleanup.enter_context(attention_implementation(model, grid.implementation))
            cleanup.enter_context(open_session(modules, dispatch))
            if watched:
                cleanup.enter_context(Interceptor(dispatch.attend, watched, dispatch.sequences))
        dispatch.observers.append(observer)
        cleanup.callback(dispatch.observers.remove, observer)
        yield


@contextmanager
def output_hook(lm: LoadedModel, visit: OutputVisitor) -> Iterator[None]:
    """Let ``visit`` read and replace the heads' outputs of every layer.

    Later hooks see earlier replacements.

    Raises:
        UnsupportedModelError: The model is compiled or in train mode.
    """
    refuse_compiled(lm)
    refuse_training(lm.model)

    def hook_for(site: AttentionSite) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            refuse_training(projection)
            heads = args[0].unflatten(-1, (site.num_attention_heads, site.value_dim))
            with without_autocast(heads.device):
                changed = visit(site, heads)
            return None if changed is None else (changed.flatten(-2), *args[1:])

        return hook

    with ExitStack() as cleanup:
        for site in lm.grid.sites:
            projection = lm.module(site.output_projection)
            cleanup.callback(projection.register_forward_pre_hook(hook_for(site)).remove)
        yield
