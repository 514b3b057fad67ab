"""Distillation after the repair: a few gradient steps towards the predictions of the original model.

Only the weights that the repair solved are trained; linear repair cannot recover a lost attention pattern, and these
steps recover a part of it.

Shapes: B sequences, N tokens, M counted predictions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import cos, pi

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.attention.hooks import refuse_training
from headscan.errors import PruningError
from headscan.gradients.backward import frozen_weights
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import Edits, edited, logits


@dataclass(frozen=True)
class DistillConfig:
    """Gradient steps after the repair.

    Attributes:
        steps: Number of steps; each reads one batch.
        rate: Learning rate of Adam at the start; it falls to zero along a cosine.
        batch_tokens: Tokens of a batch.

    Raises:
        PruningError: A number is out of range.
    """

    steps: int = 100
    rate: float = 3e-4
    batch_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0 or self.batch_tokens < 1:
            raise PruningError(
                f"steps={self.steps}, rate={self.rate:g}, batch_tokens={self.batch_tokens} out of range (limit above"
                " 0). Raise them"
            )


def distill(
    lm: LoadedModel,
    calibration: Calibration,
    removed: Iterable[tuple[int, int]],
    weights: Mapping[str, Tensor],
    config: DistillConfig = DistillConfig(),
    *,
    progress: Callable[[float], None] = lambda loss: None,
) -> dict[str, Tensor]:
    """Return trained weights by parameter name, float32.

    Args:
        removed: Removed heads.
        weights: The result of `repair`, where the steps start.
        progress: Called after each step with the divergence of its batch, in nats per token.

    Raises:
        PruningError: There are no repaired weights, or the divergence is NaN.
        HeadIndexError: The model lacks a head.
        UnsupportedModelError: The model is in train mode.
    """
    if not weights:
        raise PruningError("nothing to distill: 0 repaired weights (limit 1). Repair a projection first")
    heads = tuple(Head(*head) for head in removed)
    refuse_training(lm.model)
    batches = list(replace(calibration, batch_tokens=config.batch_tokens).batches(lm.device))
    with torch.inference_mode(False), frozen_weights(lm.model):
        trained = {name: weight.detach().float().clone().requires_grad_() for name, weight in weights.items()}
        adam = torch.optim.Adam(trained.values(), lr=config.rate, betas=(0.9, 0.95))
        for step, batch in enumerate(islice(cycle(batches), config.steps)):
            for group in adam.param_groups:
                group["lr"] = config.rate * 0.5 * (1 + cos(pi * step / config.steps))
            with torch.no_grad():
                expected = logits(lm, batch).log_softmax(-1)
            with torch.enable_grad(), edited(lm, Edits(heads, trained)):
                found = logits(lm, batch).log_softmax(-1)
                each = F.kl_div(found, expected.to(found.device), reduction="none", log_target=True).sum(-1)
                shares = batch.weights.repeat_interleave(batch.scored).to(each)
                loss = (each * shares).sum() / shares.sum()
                loss.backward()
            if not torch.isfinite(loss):
                raise PruningError(f"the divergence at step {step} is {loss.item():g}. Lower `rate`")
            adam.step()
            adam.zero_grad()
            progress(loss.item())
        return {name: weight.detach() for name, weight in trained.items()}
