"""The head grid: where the attention heads of a model are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from headscan.errors import HeadIndexError


class Head(NamedTuple):
    """One query head."""

    layer: int
    head: int


@dataclass(frozen=True)
class AttentionSite:
    """One softmax attention of one layer.

    Attributes:
        site: ``self``; in encoder-decoders also ``encoder`` and ``cross``.
        layer: Index of the layer.
        path: Name of the attention module inside the model.
        output_projection: Name of the module whose input is every head's output, concatenated.
        num_attention_heads: Query heads (H).
        num_key_value_heads: KV heads (K); H is a multiple of K.
        head_dim: Width of a query and key vector (D).
        value_dim: Width of a value vector and of a head's output; differs from ``head_dim`` in a few models.
        sliding_window: How many keys a query sees, if bounded and the model says so.
        causal: No query sees a later key.
        by_interface: The model calls transformers' attention interface here; otherwise it is watched.
        kv_shared_from: The layer whose keys and values are used here again; None: the layer has its own.
    """

    site: str
    layer: int
    path: str
    output_projection: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None = None
    causal: bool = True
    by_interface: bool = True
    kv_shared_from: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class HeadGrid:
    """All attentions of one kind of site, in order of layer.

    Attributes:
        sites: The attentions; of some layers of a decoder alone there may be none.
        num_layers: All layers, also those without softmax attention.
        implementation: Name under which the instrument's attention function serves this model.
        others: Grids of the model's other kinds of sites.
        model_max_heads: Query heads of the model's widest layer, if the sites are those of a range of layers; None
            takes the maximum over the sites.
    """

    sites: tuple[AttentionSite, ...]
    num_layers: int
    implementation: str
    others: tuple[HeadGrid, ...] = ()
    model_max_heads: int | None = None

    @property
    def kind(self) -> str:
        """Which attention of a layer these are: ``self``, ``encoder`` or ``cross``."""
        return self.sites[0].site if self.sites else "self"

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of sites that the model has, this one first."""
        return (self.kind, *(other.kind for other in self.others))

    @property
    def predicts_next_token(self) -> bool:
        """Whether this is a decoder alone, none of whose tokens sees a later one."""
        return not self.others and all(site.causal for site in self.sites)

    @property
    def layers_without_heads(self) -> tuple[int, ...]:
        """Layers that have no softmax attention: recurrent or linear ones of a hybrid."""
        return tuple(sorted(set(range(self.num_layers)) - {site.layer for site in self.sites}))

    def at(self, kind: str) -> HeadGrid:
        """The grid of another kind of site.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        grids = (self, *self.others)
        for grid in grids:
            if grid.kind == kind:
                others = tuple(other for other in grids if other is not grid)
                return replace(grid, others=tuple(replace(other, others=()) for other in others))
        raise HeadIndexError(f"no site {kind!r} in this model: it has {', '.join(self.kinds)}")

    @property
    def max_heads(self) -> int:
        """Query heads of the widest layer."""
        if self.model_max_heads is not None:
            return self.model_max_heads
        return max(site.num_attention_heads for site in self.sites)

    @property
    def total_heads(self) -> int:
        """Query heads of all layers."""
        return sum(site.num_attention_heads for site in self.sites)

    @property
    def shape(self) -> tuple[int, int]:
        """``(layers, heads)`` of every statistic."""
        return self.num_layers, self.max_heads

    def heads(self) -> Iterator[Head]:
        """Every query head, layer by layer."""
        for site in self.sites:
            for head in range(site.num_attention_heads):
                yield Head(site.layer, head)

    def site_of(self, layer: int) -> AttentionSite:
        """The attention of ``layer``.

        Raises:
            HeadIndexError: The model has no such layer, or the layer has no softmax attention.
        """
        for site in self.sites:
            if site.layer == layer:
                return site
        raise HeadIndexError(f"layer {layer} has no attention heads: layers with heads are {self._layers()}")

    def check(self, heads: Iterable[tuple[int, int]]) -> tuple[Head, ...]:
        """Return ``heads`` sorted and without repetition.

        Raises:
            HeadIndexError: One of them does not exist in this model.
        """
        checked = {Head(int(layer), int(head)) for layer, head in heads}
        for layer, head in checked:
            count = self.site_of(layer).num_attention_heads
            if not 0 <= head < count:
                raise HeadIndexError(f"head ({layer}, {head}) does not exist: layer {layer} has heads 0 to {count - 1}")
        return tuple(sorted(checked))

    def as_dicts(self) -> list[dict[str, Any]]:
        """The sites as plain data, for a store or a file."""
        return [asdict(site) for site in self.sites]

    def _layers(self) -> str:
        layers = [site.layer for site in self.sites]
        if not layers:
            return "none"
        if layers == list(range(layers[0], layers[-1] + 1)):
            return f"{layers[0]} to {layers[-1]}"
        return ", ".join(map(str, layers))
