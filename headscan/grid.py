"""The head grid: the attention heads of a model by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

from headscan.errors import HeadIndexError, PruningError
from headscan.text_tables import counted

#: What is removed at once: a query head, the heads of a KV head, or all heads of a layer.
Unit = Literal["head", "group", "layer"]


class Head(NamedTuple):
    """One query head."""

    layer: int
    head: int

    @classmethod
    def of(cls, pair: Iterable[int]) -> Head:
        """Return a ``(layer, head)`` pair of any type of integers as a head.

        Raises:
            HeadIndexError: Not two integers.
        """
        try:
            layer, head = pair
            if isinstance(layer, bool) or isinstance(head, bool):
                raise TypeError
            if int(layer) == layer and int(head) == head:
                return cls(int(layer), int(head))
        except (TypeError, ValueError):
            pass
        raise HeadIndexError(f"not a head: {pair!r}. Pass (layer, head) pairs of integers, such as (3, 5)")


class _Mask(Protocol):
    """What has heads, such as `HeadMask`."""

    @property
    def heads(self) -> tuple[Head, ...]: ...


#: Query heads: pairs of layer and head, the heads of each layer by its number, a mask, or a table of bools (L, H).
Heads = Iterable[tuple[int, int]] | Mapping[int, Iterable[int]] | _Mask


def heads_of_any(heads: Heads) -> tuple[Head, ...]:
    """Return heads in any form, sorted and without duplicates.

    Raises:
        HeadIndexError: Anything else.
    """
    pairs: Any = getattr(heads, "heads", heads)  # of a mask
    if isinstance(pairs, Mapping):
        listed = ((layer, of_layer) for layer, of_layer in pairs.items())
        pairs = [(layer, head) for layer, of_layer in listed for head in _iterated(of_layer, heads)]
    elif getattr(pairs, "ndim", None) == 2 and str(pairs.dtype) in ("bool", "torch.bool"):
        pairs = [pair for pair, ablated in _numbered(pairs.tolist()) if ablated]
    return tuple(sorted({Head.of(pair) for pair in _iterated(pairs, heads)}))


def _numbered(table: Sequence[Sequence[bool]]) -> Iterator[tuple[tuple[int, int], bool]]:
    return (((layer, head), value) for layer, row in enumerate(table) for head, value in enumerate(row))


def _iterated(values: Any, heads: object) -> Iterable[Any]:
    """Return values that can be iterated and are no text; raise HeadIndexError for others."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        return values
    given = f" {values!r}" if isinstance(values, str | bytes | int | float) else ""
    raise HeadIndexError(
        f"no heads: an object of type {type(heads).__name__}{given}. Pass (layer, head) pairs, such as [(3, 5)], or"
        " {layer: heads}"
    )


def check_pairs(heads: Iterable[tuple[int, int]]) -> None:
    """Raise HeadIndexError if one of ``heads`` is no (layer, head) pair of integers of at least 0."""
    for pair in heads:
        if min(Head.of(pair)) < 0:
            raise HeadIndexError(f"not a head: {pair!r} (limit 0). Pass (layer, head) pairs of indices from 0")


def parse_head(text: str) -> tuple[int, int]:
    """Return layer and head that a text such as ``3:5`` names."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise HeadIndexError(f"{text!r} is not a head: write LAYER:HEAD, for example 3:5")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class AttentionSite:
    """One softmax attention of one layer.

    Attributes:
        kind: ``self``; in encoder-decoders also ``encoder`` and ``cross``, or ``merged`` for one softmax over the
            decoder's own tokens, which come first, and the encoder's (T5Gemma 2).
        layer: Index of the layer.
        path: Name of the attention module in the model.
        output_projection: Name of the module whose input is the concatenated output of all heads.
        num_attention_heads: Query heads (H).
        num_key_value_heads: KV heads (K); H is a multiple of K, unless `kv_index` says otherwise.
        head_dim: Width of a query and key vector (D).
        value_dim: Width of a value vector and of a head's output; differs from ``head_dim`` in a few models.
        sliding_window: Largest number of keys that a query sees; None means no limit that the model names.
        causal: No query sees a later key.
        by_interface: The module calls transformers' attention interface; if False, its operations are intercepted.
        kv_shared_from: The layer whose keys and values this layer uses; None means its own.
        kv_index: KV head of each query head, in layers that lost heads of their groups unequally; None means groups of
            equal size.
    """

    kind: str
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
    kv_index: tuple[int, ...] | None = None

    @property
    def kv_head_of(self) -> tuple[int, ...]:
        """KV head that each query head reads (H,)."""
        if self.kv_index is not None:
            return self.kv_index
        group = self.num_attention_heads // self.num_key_value_heads
        return tuple(head // group for head in range(self.num_attention_heads))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Query heads that read each KV head (K,)."""
        return tuple(self.kv_head_of.count(kv_head) for kv_head in range(self.num_key_value_heads))


@dataclass(frozen=True, repr=False)
class HeadGrid:
    """All attentions of one kind of site, ordered by layer.

    Attributes:
        sites: The attentions; a range of layers may have none.
        num_layers: Number of layers, including those without softmax attention.
        implementation: Name of the registered attention function that this model uses.
        others: Grids of the other kinds of sites.
        model_max_heads: Query heads of the model's widest layer, if the sites are those of a range of layers; None
            takes the maximum over the sites.
    """

    sites: tuple[AttentionSite, ...]
    num_layers: int
    implementation: str
    others: tuple[HeadGrid, ...] = ()
    model_max_heads: int | None = None

    def __repr__(self) -> str:
        parts = []
        for grid in (self, *self.others):
            kv_heads = sum(site.num_key_value_heads for site in grid.sites)
            heads = (
                f"{counted(grid.total_heads, 'query head')}, {counted(kv_heads, 'KV head')} in {len(grid.sites)} of"
                f" {counted(grid.num_layers, 'layer')}"
            )
            parts.append(f"{grid.kind}: {heads}")
        return f"HeadGrid({'; '.join(parts)})"

    @property
    def kind(self) -> str:
        """Kind of site: ``self``, ``encoder``, ``cross`` or ``merged``."""
        return self.sites[0].kind if self.sites else "self"

    @property
    def reads_encoder(self) -> bool:
        """True if queries of the decoder see keys of the encoder."""
        return self.kind in ("cross", "merged")

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of sites of the model, this one first."""
        return (self.kind, *(other.kind for other in self.others))

    @property
    def predicts_next_token(self) -> bool:
        """True for a decoder without an encoder, whose attention is causal."""
        return not self.others and all(site.causal for site in self.sites)

    @property
    def layers_without_heads(self) -> tuple[int, ...]:
        """Layers without softmax attention: the recurrent or linear ones of a hybrid."""
        return tuple(sorted(set(range(self.num_layers)) - {site.layer for site in self.sites}))

    def at(self, kind: str) -> HeadGrid:
        """Return the grid of a kind of site.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        grids = (self, *self.others)
        for grid in grids:
            if grid.kind == kind:
                others = tuple(other for other in grids if other is not grid)
                return replace(grid, others=tuple(replace(other, others=()) for other in others))
        raise HeadIndexError(f"no site {kind!r} in this model. Choose one of {', '.join(self.kinds)}")

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
        """Shape ``(layers, heads)`` of every statistic."""
        return self.num_layers, self.max_heads

    def heads(self) -> Iterator[Head]:
        """Yield every query head, layer by layer."""
        for site in self.sites:
            for head in range(site.num_attention_heads):
                yield Head(site.layer, head)

    def site_of(self, layer: int) -> AttentionSite:
        """Return the attention of ``layer``; raise if it has none."""
        for site in self.sites:
            if site.layer == layer:
                return site
        raise HeadIndexError(f"layer {layer} has no attention heads. Choose a layer with heads: {self._layers()}")

    def check(self, heads: Heads) -> tuple[Head, ...]:
        """Return ``heads`` sorted and without duplicates; raise if the model lacks one."""
        checked = heads_of_any(heads)
        for layer, head in checked:
            count = self.site_of(layer).num_attention_heads
            if not 0 <= head < count:
                raise HeadIndexError(f"no head {head} in layer {layer} (limit {count - 1}). Choose another")
        return checked

    def rows(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return numbers by name as one row per sequence and query head, which ``pandas.DataFrame`` takes.

        Args:
            values: Tensors or arrays (B, L, H), such as those of `headscan.collect` and `headscan.score`; bins of
                profiles become lists. Of values (L, H), such as those of `headscan.probe`, rows have no ``sequence``.

        Raises:
            HeadIndexError: Values have the shape of another model, or of different batches.
        """
        if not isinstance(values, Mapping) or not all(hasattr(value, "shape") for value in values.values()):
            raise HeadIndexError("`values` are no tensors by name. Pass the result of `headscan.collect` or `probe`")
        shapes = [tuple(value.shape) for value in values.values()]
        whole = all(len(shape) == 2 for shape in shapes)
        batches = {(1, *shape) if whole else shape[:3] for shape in shapes}
        if len(batches) > 1 or any(batch[1:] != self.shape for batch in batches):
            raise HeadIndexError(
                f"values have shapes {', '.join(map(str, dict.fromkeys(shapes)))} (limit: one batch of heads"
                f" {self.shape}). Pass values of one call on this model"
            )
        listed = {name: [value.tolist()] if whole else value.tolist() for name, value in values.items()}
        return [
            ({} if whole else {"sequence": sequence})
            | {"layer": layer, "head": head}
            | {name: value[sequence][layer][head] for name, value in listed.items()}
            for sequence in range(sum(batch[0] for batch in batches))
            for layer, head in self.heads()
        ]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the sites as plain data, for a store or a file, where ``site`` is the kind of a site."""
        return [{"site": values.pop("kind"), **values} for values in map(asdict, self.sites)]

    def _layers(self) -> str:
        layers = [site.layer for site in self.sites]
        if not layers:
            return "none"
        if layers == list(range(layers[0], layers[-1] + 1)):
            return f"{layers[0]} to {layers[-1]}"
        return ", ".join(map(str, layers))


def find_units(grid: HeadGrid, unit: Unit) -> dict[int, list[tuple[Head, ...]]]:
    """Return the heads of each unit, by layer."""
    units: dict[int, list[tuple[Head, ...]]] = {}
    for site in grid.sites:
        heads = [Head(site.layer, head) for head in range(site.num_attention_heads)]
        if unit == "head":
            units[site.layer] = [(head,) for head in heads]
        elif unit == "group":
            index = site.kv_head_of
            groups = (tuple(h for h in heads if index[h.head] == kv) for kv in range(site.num_key_value_heads))
            units[site.layer] = [group for group in groups if group]
        elif unit == "layer":
            units[site.layer] = [tuple(heads)] if heads else []
        else:
            raise PruningError(f"`unit={unit!r}` is unknown. Choose {' or '.join(get_args(Unit))}")
    return units
