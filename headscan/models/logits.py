"""Logits at chosen positions of a batch only.

Shapes: B sequences, N tokens, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headscan.models.loaded_model import LoadedModel


def logits_at(lm: LoadedModel, ids: Tensor, rows: list[int], columns: list[int], **kwargs: Any) -> Tensor:
    """Return logits (M, V) at the positions ``(rows[i], columns[i])`` of a batch of ids (B, N).

    An output head that is a module receives the hidden states of these positions only; otherwise logits are computed
    for whole columns, or for all positions.
    """
    head = lm.model.get_output_embeddings()
    gather = _Gather(rows, columns, tuple(ids.shape))
    handle = head.register_forward_pre_hook(gather) if isinstance(head, nn.Module) else None
    # With logits_to_keep, layers that reuse keys of others see kept tokens only, but rules need whole sequences.
    borrows = getattr(lm.model.config.get_text_config(), "num_kv_shared_layers", 0)
    if handle is None and not borrows and "logits_to_keep" in inspect.signature(lm.model.forward).parameters:
        kept = sorted(set(columns))
        kwargs["logits_to_keep"] = torch.tensor(kept, device=lm.device)
        columns = [kept.index(column) for column in columns]
    try:
        logits: Tensor = lm.model(input_ids=ids.to(lm.device), **kwargs).logits
    finally:
        if handle is not None:
            handle.remove()
    return logits[0] if gather.done else logits[rows, columns]


class _Gather:
    """A pre-hook that keeps only the chosen hidden states.

    It replaces the output head's input (B, N, E) by (1, M, E).
    """

    def __init__(self, rows: list[int], columns: list[int], shape: tuple[int, ...]) -> None:
        self._rows, self._columns, self._shape = rows, columns, shape
        self.done = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or args[0].ndim != 3 or tuple(args[0].shape[:2]) != self._shape or self.done:
            return None  # a head with another call signature computes all logits
        self.done = True
        return (args[0][self._rows, self._columns][None], *args[1:])
