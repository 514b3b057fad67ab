"""Which rows or columns of an attention layer's weights belong to which heads.

This file is copied next to a pruned model's weights, so it imports torch alone.

Shapes: H query heads, K KV heads, G = H / K, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class CannotSliceError(ValueError):
    """Heads of a layer cannot be removed from its weights."""


@dataclass(frozen=True)
class LayerHeads:
    """The query heads of a layer that remain: their original indices, ascending, and the original numbers H and K.
    ``has_added_bias``: the output projection has a bias that the original lacks.
    """

    kept: tuple[int, ...]
    heads: int
    kv_heads: int
    has_added_bias: bool = False

    @classmethod
    def all(cls, heads: int, kv_heads: int) -> LayerHeads:
        return cls(tuple(range(heads)), heads, kv_heads)

    @property
    def kept_kv(self) -> tuple[int, ...]:
        """Original indices of the KV heads that a remaining query head reads."""
        return tuple(sorted({self._kv_head(head) for head in self.kept}))

    @property
    def kv_index(self) -> tuple[int, ...]:
        """For each remaining query head the position of its KV head in `kept_kv`."""
        return tuple(self.kept_kv.index(self._kv_head(head)) for head in self.kept)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of remaining query heads of each KV head in `kept_kv`."""
        index = self.kv_index
        return tuple(index.count(at) for at in range(len(self.kept_kv)))

    @property
    def groups_are_equal(self) -> bool:
        """True if all remaining KV heads serve equally many query heads."""
        return len(set(self.group_sizes)) <= 1

    @property
    def slots(self) -> tuple[int, ...]:
        """Places of the remaining query heads, if all groups are as wide as the widest."""
        index, width = self.kv_index, max(self.group_sizes)
        return tuple(kv_head * width + index[:at].count(kv_head) for at, kv_head in enumerate(index))

    def _kv_head(self, head: int) -> int:
        return head // (self.heads // self.kv_heads)


@dataclass(frozen=True)
class KeptPositions:
    """Heads to keep, as positions among the current H query heads and K KV heads."""

    heads: int
    kv_heads: int
    kept: tuple[int, ...]
    kept_kv: tuple[int, ...]

    @classmethod
    def between(cls, before: LayerHeads, after: LayerHeads) -> KeptPositions:
        """Return the choice that leads from some heads of a layer to fewer."""
        return cls(
            len(before.kept),
            len(before.kept_kv),
            tuple(before.kept.index(head) for head in after.kept),
            tuple(before.kept_kv.index(head) for head in after.kept_kv),
        )


#: Dimension and indices that remain of a weight.
Rows = tuple[int, Tensor]

_QUERY = {"q_proj", "gate_proj", "g_proj", "sinks"}
_KEY_VALUE = {"k_proj", "v_proj"}
#: Names of output projections.
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


def output_name(attention: nn.Module) -> str:
    for name in OUTPUTS:
        if isinstance(getattr(attention, name, None), nn.Module):
            return name
    raise CannotSliceError(
        f"{type(attention).__name__} has no output projection with a known name (limit: {', '.join(OUTPUTS)}). Load "
        "another model"
    )


def kept_rows(attention: nn.Module, choice: KeptPositions) -> dict[str, Rows]:
    """Return what remains of each parameter that shrinks, by its name in the module."""
    rows_of = {}
    for name, parameter in attention.named_parameters():
        rows = _kept_rows(attention, name, parameter, choice)
        if rows is not None and len(rows[1]) < parameter.shape[rows[0]]:
            rows_of[name] = rows
    return rows_of


def _kept_rows(attention: nn.Module, name: str, parameter: Tensor, choice: KeptPositions) -> Rows | None:
    """Return what remains of a parameter; None if it is the same for all heads."""
    part, _, leaf = name.partition(".")
    # The weight of a Conv1D is (in, out).
    transposed = type(getattr(attention, part)).__name__ == "Conv1D" and parameter.ndim == 2
    if part in OUTPUTS:
        if leaf == "bias":
            return None
        dim = 0 if transposed else 1
        return dim, _of_heads(choice.kept, choice.heads, parameter.shape[dim], name)
    dim = 1 if transposed else 0
    size = parameter.shape[dim]
    if part in _QUERY:
        return dim, _of_heads(choice.kept, choice.heads, size, name)
    if part in _KEY_VALUE:
        return dim, _of_heads(choice.kept_kv, choice.kv_heads, size, name)
    if "norm" in part:
        return _norm_rows(name, parameter, choice, getattr(attention, "head_dim", None))
    names = {cls.__name__ for cls in type(attention).__mro__}
    layout = next((layout for name, known, layout in _FUSED if name in names and known == part), None)
    if layout is None:
        raise CannotSliceError(f"{type(attention).__name__} has a part of unknown layout: {name}. Load another model")
    return dim, layout(choice, size)


def _of_heads(kept: Sequence[int], heads: int, size: int, name: str) -> Tensor:
    """Return the indices of ``kept`` heads, of ``heads`` neighbours with the same width."""
    if size % heads:
        raise CannotSliceError(f"{name} has size {size} (limit: a multiple of {heads} heads). Load another model")
    width = size // heads
    return (torch.tensor(kept, dtype=torch.long)[:, None] * width + torch.arange(width)).flatten()


def _norm_rows(name: str, parameter: Tensor, choice: KeptPositions, head_dim: int | None) -> Rows | None:
    if parameter.ndim == 1 and parameter.shape[0] == head_dim and name.count(".") == 1:
        return None
    if parameter.ndim == 2 and parameter.shape[0] in (choice.heads, choice.kv_heads):
        of_query = name.startswith("q")
        kept, heads = (choice.kept, choice.heads) if of_query else (choice.kept_kv, choice.kv_heads)
        if parameter.shape[0] == heads:
            return 0, torch.tensor(kept, dtype=torch.long)
    if name.startswith("k") and len(choice.kept_kv) == choice.kv_heads:
        return None
    raise CannotSliceError(f"{name} normalises over all heads together. Remove all heads of the layer, or none")


def _concatenated(choice: KeptPositions, size: int) -> Tensor:
    D = size // (choice.heads + 2 * choice.kv_heads)
    query = _of_heads(choice.kept, choice.heads, choice.heads * D, "queries")
    key = choice.heads * D + _of_heads(choice.kept_kv, choice.kv_heads, choice.kv_heads * D, "keys")
    return torch.cat([query, key, key + choice.kv_heads * D])


def _grouped(choice: KeptPositions, size: int) -> Tensor:
    """Return the rows by group: its queries, its key and its value."""
    G = choice.heads // choice.kv_heads
    D = size // (choice.kv_heads * (G + 2))
    slots = []
    for kv_head in choice.kept_kv:
        first = kv_head * (G + 2)
        slots += [first + head % G for head in choice.kept if head // G == kv_head] + [first + G, first + G + 1]
    return _of_heads(slots, choice.kv_heads * (G + 2), choice.kv_heads * (G + 2) * D, "queries, keys and values")


def _in_four_parts(choice: KeptPositions, size: int) -> Tensor:
    """Return the rows of CodeGen: four parts, each with queries, values and keys of a quarter of the heads."""
    if len(choice.kept) % 4:
        raise CannotSliceError(f"{len(choice.kept)} heads would remain (limit: a multiple of 4). Remove other heads")
    D, part, new_part = size // (3 * choice.heads), choice.heads // 4, len(choice.kept) // 4
    slots = []
    for at in range(0, len(choice.kept), new_part):
        for kind in range(3):
            slots += [(3 * (head // part) + kind) * part + head % part for head in choice.kept[at : at + new_part]]
    return _of_heads(slots, 3 * choice.heads, 3 * choice.heads * D, "queries, keys and values")


#: Layouts of projections for queries, keys and values together, by the class of the attention.
_FUSED: tuple[tuple[str, str, Callable[[KeptPositions, int], Tensor]], ...] = (
    ("Phi3Attention", "qkv_proj", _concatenated),
    ("GPT2Attention", "c_attn", _concatenated),
    ("MptAttention", "Wqkv", _concatenated),
    ("DbrxAttention", "Wqkv", _concatenated),
    ("GPTBigCodeAttention", "c_attn", _grouped),
    ("GPTNeoXAttention", "query_key_value", _grouped),
    ("PersimmonAttention", "query_key_value", _grouped),
    ("BloomAttention", "query_key_value", _grouped),
    ("FalconAttention", "query_key_value", _grouped),
    ("CodeGenAttention", "qkv_proj", _in_four_parts),
)
