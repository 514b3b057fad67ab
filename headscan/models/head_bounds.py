"""Bounds of layer and head indices from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscan.errors import HeadIndexError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedConfig


def check_bounds(config: PreTrainedConfig, heads: Iterable[tuple[int, int]]) -> None:
    """Raise if a head exceeds a configuration's bounds, before weights are read.

    Heads per layer differ in some models and show only in the loaded model: its grid checks them.

    Raises:
        HeadIndexError: A layer or head index exceeds the configuration's counts.
    """
    text = config.get_text_config(decoder=True)
    layers, widest = (_count(getattr(text, name, None)) for name in ("num_hidden_layers", "num_attention_heads"))
    for layer, head in heads:
        if layers is not None and layer >= layers:
            raise HeadIndexError(
                f"no head {layer}:{head} in the model: layer {layer} (limit {layers - 1}). Choose another"
            )
        if widest is not None and head >= widest:
            raise HeadIndexError(
                f"no head {layer}:{head} in the model: head {head} (limit {widest - 1}). Choose another"
            )


def _count(value: object) -> int | None:
    """Return a count, or the largest of a list per layer.

    It is None if the configuration has neither.
    """
    if isinstance(value, list | tuple):
        return max((each for each in value if isinstance(each, int)), default=None)
    return value if isinstance(value, int) else None
