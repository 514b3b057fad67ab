"""The two doors through which a model's heads are seen, as reversible context managers.

The *attention door* shows query, key and value of every layer; the *output door* shows, and may replace, what every
head hands to the output projection. Both can be nested, and neither leaves anything behind, whatever is raised inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from headscan.attention import IMPLEMENTATION, SESSION, AttentionCall, register
from headscan.grid import AttentionSite
from headscan.weights import AttentionSummary, MassWidths

if TYPE_CHECKING:
    from headscan.loading import LoadedModel

#: Called with a site and its heads' outputs (B, N, H, Dv); returns what goes on instead, or None for no change.
OutputVisitor = Callable[[AttentionSite, Tensor], Tensor | None]


class AttentionObserver(Protocol):
    """Who wants to know what attention weights say.

    Attributes:
        needs: Numbers per query that are wanted (`headscan.weights.per_query_needs`).
        value_norms: Whether norms of value vectors are wanted.
        widths: Widths of sink and recent mass.
        path: ``auto``, ``fused`` or ``blockwise``.
    """

    needs: frozenset[str]
    value_norms: bool
    widths: MassWidths
    path: str

    def attended(self, site: AttentionSite, summary: AttentionSummary) -> None:
        """Take the numbers of one layer, before its heads' outputs reach the output door."""
        ...


class _Dispatch:
    """Runs a layer's attention once for each observer that looks at it."""

    def __init__(self, sites: dict[nn.Module, AttentionSite]) -> None:
        self.sites = sites
        self.observers: list[AttentionObserver] = []

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        site = self.sites[module]
        out: Tensor | None = None
        for observer in self.observers:
            out, summary = call.run(
                observer.needs, observer.widths, value_norms=observer.value_norms, path=observer.path
            )
            observer.attended(site, summary)
        assert out is not None, "a door without an observer"
        return out


@contextmanager
def attention_door(lm: LoadedModel, observer: AttentionObserver) -> Iterator[None]:
    """Let ``observer`` see every attention call of the model; a door opened inside another adds its observer."""
    modules = {lm.module(site.path): site for site in lm.grid.sites}
    dispatch = getattr(next(iter(modules)), SESSION, None)
    with ExitStack() as cleanup:
        if dispatch is None:
            register()
            dispatch = _Dispatch(modules)
            before = lm.model.config._attn_implementation
            lm.model.set_attn_implementation(IMPLEMENTATION)
            cleanup.callback(lm.model.set_attn_implementation, before)
            for module in modules:
                setattr(module, SESSION, dispatch)
                cleanup.callback(delattr, module, SESSION)
        dispatch.observers.append(observer)
        cleanup.callback(dispatch.observers.remove, observer)
        yield


@contextmanager
def output_door(lm: LoadedModel, visit: OutputVisitor) -> Iterator[None]:
    """Let ``visit`` see, and replace, the heads' outputs of every layer; later doors see what earlier ones leave."""

    def hook_for(site: AttentionSite) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            heads = args[0].unflatten(-1, (site.num_attention_heads, site.value_dim))
            changed = visit(site, heads)
            return None if changed is None else (changed.flatten(-2), *args[1:])

        return hook

    with ExitStack() as cleanup:
        for site in lm.grid.sites:
            projection = lm.module(site.output_projection)
            cleanup.callback(projection.register_forward_pre_hook(hook_for(site)).remove)
        yield
