"""Resample ablation: an ablated head outputs what it outputs at the same position of another text.

Shapes: B sequences, N tokens, T texts, M their tokens, H query heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from headscan.ablation.replacements import StoredOutputs, Value
from headscan.errors import InterventionError

if TYPE_CHECKING:
    from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True, eq=False)
class HeadSamples(StoredOutputs):
    """Outputs of heads on other texts, from `collect_outputs.head_samples`.

    ``by_layer`` holds (T, M, H, D) each. The text of a sequence depends on the seed and the sequence's key only, not on
    the batch.

    Attributes:
        seed: Integer, at least 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise InterventionError(f"seed of samples: {self.seed} (limit 0). Set `seed` to 0 or more")

    def _settings(self) -> tuple[object, ...]:
        return (self.kind, self.seed)

    @property
    def value(self) -> Value:
        return "resample"

    @property
    def position_free(self) -> bool:
        return False

    def outputs(self, stored: Tensor, heads_BNHD: Tensor, keys: Sequence[int]) -> Tensor:
        texts, most = stored.shape[:2]
        tokens = heads_BNHD.shape[1]
        if tokens > most:
            raise InterventionError(
                f"sequences are longer than the samples: {tokens} tokens (limit {most}). Collect samples of longer "
                "texts"
            )
        chosen = [int(np.random.default_rng([self.seed, key]).integers(texts)) for key in keys]
        return stored[torch.tensor(chosen, device=stored.device), :tokens]

    @contextmanager
    def watching(self, lm: LoadedModel) -> Iterator[None]:
        """Refuse passes that continue from a KV cache: their first token is not at position 0."""

        def refuse(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Cache) and value.get_seq_length() > 0:
                    raise InterventionError(
                        f"resample ablation needs whole inputs: {value.get_seq_length()} tokens are in a KV cache "
                        "(limit 0). Use no KV cache (use_cache=False)"
                    )

        handle = lm.model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
