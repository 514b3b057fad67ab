"""Objectives of a fit of gates, by batch.

Shapes: B sequences, N tokens, M real tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.errors import UnsupportedModelError
from headscan.gates.gate_config import Objective
from headscan.gradients.example_losses import Loss
from headscan.gradients.head_importance import default_loss
from headscan.models.forward_inputs import without_autocast
from headscan.models.loaded_model import LoadedModel
from headscan.models.logits import logits_at


@dataclass(frozen=True)
class DivergenceLoss(Loss):
    """The divergence of a decoder's predictions from given ones.

    Attributes:
        ids: Token ids (B, N), padded on the right.
        lengths: Real tokens of each sequence.
        expected: Log-probabilities (M, V) after the real tokens, float32 or wider.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    expected: Tensor

    @classmethod
    def of(cls, lm: LoadedModel, ids: Tensor, lengths: Sequence[int]) -> DivergenceLoss:
        """Take the predictions of the model as it is now.

        Raises:
            UnsupportedModelError: The model is no decoder.
        """
        if not lm.grid.predicts_next_token:
            raise UnsupportedModelError(f"{lm.source} is no decoder, so it has no predictions. Use objective='loss'")
        with torch.no_grad(), without_autocast(lm.device):
            return cls(ids, tuple(lengths), _log_probabilities(lm, ids, lengths))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return {"input_ids": self.ids}

    @property
    def texts(self) -> Mapping[str, Any]:
        return {"input_ids": self.ids, "lengths": self.lengths}

    @property
    def scale(self) -> float:
        return max(self.lengths)

    def losses(self, lm: LoadedModel) -> Tensor:
        found = _log_probabilities(lm, self.ids, self.lengths)
        each_M = F.kl_div(found, self.expected, reduction="none", log_target=True).sum(-1)
        return torch.stack([part.mean() for part in each_M.split(self.lengths)])


def batch_objective(lm: LoadedModel, name: Objective, ids: Tensor, lengths: Sequence[int], keys: Sequence[int]) -> Loss:
    """Return the objective of a batch, a mean over the tokens of each sequence.

    Args:
        ids: Token ids (B, N) on the model's input device, padded on the right.
        lengths: Real tokens of each sequence.
        keys: Index of each sequence, which seeds the masked tokens of an encoder.

    Raises:
        UnsupportedModelError: The model has no such objective on plain text.
    """
    if name == "divergence":
        return DivergenceLoss.of(lm, ids, lengths)
    return default_loss(lm, ids, lengths, keys=keys)


def _log_probabilities(lm: LoadedModel, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return predictions (M, V) after the real tokens, sequence by sequence, float32 or wider."""
    places = [(row, column) for row, length in enumerate(lengths) for column in range(length)]
    logits_MV = logits_at(lm, ids, [row for row, _ in places], [column for _, column in places], use_cache=False)
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(-1)
