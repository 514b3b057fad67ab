"""The head grid: where the attention heads of a model are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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
        site: ``self`` in decoders.
        layer: Index of the layer.
        path: Name of the attention module inside the model.
        output_projection: Name of the module whose input is every head's output, concatenated.
        num_attention_heads: Query heads (H).
        num_key_value_heads: KV heads (K); H is a multiple of K.
        head_dim: Width of a query and key vector (D).
        value_dim: Width of a value vector and of a head's output; differs from ``head_dim`` in a few models.
        sliding_window: How many keys a query sees, if bounded.
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

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class HeadGrid:
    """All attention sites of a model, in order of layer.

    ``num_layers`` counts every layer of the model, also those without softmax attention.
    """

    sites: tuple[AttentionSite, ...]
    num_layers: int

    @property
    def num_heads(self) -> int:
        """Query heads of the widest layer."""
        return max(site.num_attention_heads for site in self.sites)

    @property
    def shape(self) -> tuple[int, int]:
        """``(layers, heads)`` of every statistic."""
        return self.num_layers, self.num_heads

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
        if layers == list(range(layers[0], layers[-1] + 1)):
            return f"{layers[0]} to {layers[-1]}"
        return ", ".join(map(str, layers))
