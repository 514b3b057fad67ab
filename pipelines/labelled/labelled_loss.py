"""Losses of labelled examples."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.gradients.example_losses import Loss
from headscan.gradients.task_losses import ClassificationLoss, TargetTextLoss
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.labelled.labelled_texts import Answers, LabelledText
from headscan.pipelines.scoring.batching import pad


def labelled_loss(lm: LoadedModel, answers: Answers, texts: Sequence[LabelledText], *, summed: bool = False) -> Loss:
    """Return the loss of each example of a batch.

    Args:
        summed: The loss of a target text is the sum over its tokens instead of the mean.
    """
    ids, lengths = pad([text.ids for text in texts])
    ids = ids.to(lm.device)
    targets = [text.target_ids for text in texts]
    if answers is Answers.CLASS:
        return ClassificationLoss.of(lm, ids, lengths.tolist(), [target for (target,) in targets])
    labels, label_lengths = pad(targets)
    return TargetTextLoss.of(lm, ids, lengths.tolist(), labels, label_lengths.tolist(), summed=summed)
