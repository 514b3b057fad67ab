"""Real tokens of each sequence, from the arguments of a forward pass.

Shapes: B sequences, N tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscan.errors import InterventionError
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_means import real_tokens


def mask_argument(lm: LoadedModel) -> str:
    """Return the name of the padding mask of the sequences that the model's sites read."""
    return "decoder_attention_mask" if lm.is_encoder_decoder and lm.grid.kind != "encoder" else "attention_mask"


class PaddingWatch:
    """Observes the padding mask of each forward pass.

    Attributes:
        passes: Number of passes started.
        mask: Padding mask of the current pass; None if it has none.
    """

    def __init__(self, lm: LoadedModel) -> None:
        self.passes = 0
        self.mask: Any = None
        self._model = lm.model
        self._name = mask_argument(lm)
        self._running: nn.Module | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe passes while the context is open."""
        with ExitStack() as hooks:
            # Callers may run the base model directly, and some heads call an inner part of the model themselves.
            for module in {self._model, self._model.base_model}:
                hooks.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._end, always_call=True).remove)
            yield

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running is not None:
            return
        self._running = module
        self.passes += 1
        self.mask = kwargs.get(self._name)
        if self.mask is None and args:
            self.mask = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)).get(self._name)

    def _end(self, module: nn.Module, *_: object) -> None:
        if module is self._running:
            self._running = None


def lengths_in_mask(mask: Any, tokens: int) -> Tensor:
    """Return the real tokens (B,) of a padding mask (B, N), on the CPU.

    Raises:
        InterventionError: The mask has not ``tokens`` tokens, or is not padded on the right only.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        what = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        raise InterventionError(
            f"the attention mask has {what} (limit 2), but rules read lengths from it. Give a padding mask "
            "(sequences, tokens) with 1 for real tokens"
        )
    if mask.shape[1] != tokens:
        raise InterventionError(
            f"the attention mask covers {mask.shape[1]} tokens (limit {tokens}, those of the pass), but rules "
            "need whole inputs. Use no KV cache (use_cache=False)"
        )
    real = mask.detach().cpu().bool()
    lengths = real.sum(1)
    if bool((wrong := (real != real_tokens(lengths, tokens)).any(1)).any()):
        raise InterventionError(
            f"the attention mask hides tokens before real ones in sequence {int(wrong.nonzero()[0])}, but rules need "
            "sequences that start at token 0. Pad on the right (tokenizer.padding_side = 'right')"
        )
    return lengths


def agreed_lengths(sources: Mapping[str, Tensor], sequences: int, tokens: int) -> Tensor:
    """Return the real tokens (B,) on which all sources agree; without sources all tokens are real.

    Args:
        sources: Lengths (B,) by the name of their source.
        sequences, tokens: B and N of the pass.

    Raises:
        InterventionError: Lengths do not fit the batch, or contradict each other.
    """
    known: tuple[str, Tensor] | None = None
    for name, lengths in sources.items():
        if lengths.shape != (sequences,) or int(lengths.max()) > tokens or int(lengths.min()) < 1:
            raise InterventionError(
                f"lengths {lengths.tolist()[:8]} ({name}) do not fit a batch of {sequences} sequences of {tokens} "
                "tokens, and rules need whole inputs. Set `lengths` (or record.lengths) and use no KV cache"
            )
        if known is not None and not torch.equal(known[1].cpu(), lengths.cpu()):
            raise InterventionError(
                f"the lengths of a pass contradict each other: {known[1].tolist()[:8]} ({known[0]}), "
                f"{lengths.tolist()[:8]} ({name}). Give one of them, or equal ones"
            )
        known = (name, lengths)
    return torch.full((sequences,), tokens) if known is None else known[1]
