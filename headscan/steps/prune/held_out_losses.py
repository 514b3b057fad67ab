"""Losses of a pruned model on texts and recall prompts that neither chose heads nor repaired projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.engine.prompt_losses import Prompts
from headscan.models.forward_inputs import before_last
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited, logits
from headscan.texts.held_out_text import HeldOutText
from headscan.texts.sequences import spread
from headscan.texts.token_requests import Request

#: Most held-out texts whose loss is measured for each model; an evaluation reads all of them.
_TEXTS = 32


@dataclass(frozen=True)
class LossChange:
    """Mean loss of one task in nats per scored token; ``masked``: with the heads zeroed and nothing repaired."""

    original: float
    masked: float
    repaired: float


def as_calibration(requests: Sequence[Request], batch_tokens: int) -> Calibration:
    """Return requests as sequences whose scored tokens count."""
    ids, lengths = pad([request.ids for request in requests])
    scored = torch.tensor([request.scored_tokens for request in requests])
    return Calibration(ids, lengths, batch_tokens, before_last(lengths, scored, ids.shape[1]))


class HeldOutLosses:
    """The losses of edited models on the same held-out tokens."""

    def __init__(self, lm: LoadedModel, text: HeldOutText, prompts: Sequence[Prompts], batch_tokens: int) -> None:
        self._lm = lm
        texts = [chunk.request for chunk in spread(text.chunks, _TEXTS)]
        self._tasks = {f"text of {text.corpus}": as_calibration(texts, batch_tokens)}
        self._tasks |= {each.name: as_calibration(each.requests, batch_tokens) for each in prompts}

    @cached_property
    def _original(self) -> dict[str, float]:
        return self._losses(NO_EDITS)

    def changes(self, edits: Edits) -> dict[str, LossChange]:
        """Return the losses by task of a model without heads, before and after its repair."""
        repaired = self._losses(edits)
        masked = self._losses(Edits(edits.removed)) if edits.weights else repaired
        return {task: LossChange(original, masked[task], repaired[task]) for task, original in self._original.items()}

    @torch.no_grad()
    def _losses(self, edits: Edits) -> dict[str, float]:
        losses = {}
        for task, texts in self._tasks.items():
            total: Tensor | float = 0.0
            for batch in texts.for_logits.batches(self._lm.device):
                with edited(self._lm, edits):
                    predicted = logits(self._lm, batch)
                next_BN = batch.ids.roll(-1, 1)
                targets = next_BN[batch.scoring_BN].to(predicted.device)
                total = total + F.cross_entropy(predicted, targets, reduction="none").sum(dtype=torch.float64)
            losses[task] = float(total) / int(texts.predictions.sum())
        return losses


def loss_rows(changes: Mapping[str, LossChange]) -> list[dict[str, str]]:
    return [
        {
            "held-out loss, nats": task,
            "original": f"{loss.original:.3f}",
            "heads zeroed": f"{loss.masked:.3f}",
            "repaired": f"{loss.repaired:.3f}",
        }
        for task, loss in changes.items()
    ]
