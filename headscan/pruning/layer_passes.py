"""Passes of a batch through one layer or the whole model.

Shapes: B sequences, N tokens, M counted predictions, E width of a hidden state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headscan.layers.blocks import Blocks
from headscan.layers.layer_range_pass import running_range
from headscan.models.forward_inputs import run, without_autocast
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Batch


@dataclass
class Seen:
    """Inputs and outputs of modules in the last pass, by module name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def watched_modules(blocks: Blocks, paths: Iterable[str]) -> Iterator[Seen]:
    """Keep the first input and the output of modules in each pass."""
    seen = Seen()
    with ExitStack() as hooks:
        for path in paths:

            def keep(_: nn.Module, args: tuple[Any, ...], out: Any, path: str = path) -> None:
                seen.inputs[path] = args[0]
                seen.outputs[path] = out[0] if isinstance(out, tuple) else out

            hooks.callback(blocks.lm.module(path).register_forward_hook(keep).remove)
        yield seen


def through_layer(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor | None) -> Tensor:
    """Return the output of one layer (B, N, E).

    Args:
        hidden: Its input (B, N, E); None uses the model's embedding, for layer 0.
    """
    path = f"{blocks.path}.{layer}"
    with watched_modules(blocks, [path]) as seen, running_range(blocks.all, layer, layer + 1, hidden):
        run(blocks.lm.model, {"input_ids": batch.ids})
    return seen.outputs[path]


class Reached(Exception):
    """Ends a pass in a hook, because the rest of the layer is not needed."""


def into_layer(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor | None) -> None:
    """Run one layer, at most until a hook raises `Reached`; see `through_layer`."""
    with suppress(Reached), running_range(blocks.all, layer, layer + 1, hidden):
        run(blocks.lm.model, {"input_ids": batch.ids})


def projection_inputs(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor | None, path: str) -> Tensor:
    """Return the input of a projection of one layer (B, N, F); what follows it in the layer does not run."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        found[:] = [batch.by_token(args[0])]
        raise Reached

    handle = blocks.lm.module(path).register_forward_pre_hook(stop)
    try:
        into_layer(blocks, layer, batch, hidden)
    finally:
        handle.remove()
    return found[0]


def entering(blocks: Blocks, batch: Batch, layer: int = 0) -> Tensor:
    """Return the hidden states (B, N, E) that enter a layer."""
    with blocks.keep_inputs([layer]) as kept, running_range(blocks.all, 0, layer + 1):
        run(blocks.lm.model, {"input_ids": batch.ids})
    return kept[layer]


def logits(lm: LoadedModel, batch: Batch) -> Tensor:
    """Return the model's logits (M, V) of the predictions that count, float32."""
    with without_autocast(lm.device):
        found: Tensor = lm.model(input_ids=batch.ids, use_cache=False).logits
    return found[batch.scoring_BN.to(found.device)].float()
