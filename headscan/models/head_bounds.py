"""How many layers and heads a model can have by its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscan.errors import HeadIndexError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedConfig


def check_bounds(config: PreTrainedConfig, heads: Iterable[tuple[int, int]]) -> None:
    """Refuse heads that no model of this configuration has, before a weight is read.

    Only the loaded model shows which layers have heads, and how many each has: those are checked by its grid.

    Raises:
        HeadIndexError: A layer or head index is beyond the configuration's counts.
    """
    text = config.get_text_config(decoder=True)
    layers, widest = (_count(getattr(text, name, None)) for name in ("num_hidden_layers", "num_attention_heads"))
    for layer, head in heads:
        if layers is not None and layer >= layers:
            raise HeadIndexError(f"head {layer}:{head} is not in the model: layer {layer} (layers 0 to {layers - 1})")
        if widest is not None and head >= widest:
            raise HeadIndexError(f"head {layer}:{head} is not in the model: head {head} (heads 0 to {widest - 1})")


def _count(value: object) -> int | None:
    """A count, of counts layer by layer the largest; None if the configuration has none."""
    if isinstance(value, list | tuple):
        return max((each for each in value if isinstance(each, int)), default=None)
    return value if isinstance(value, int) else None
