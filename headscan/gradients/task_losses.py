"""Losses of encoders, encoder-decoders and classifiers.

Shapes: B sequences, N tokens, M tokens of the decoder, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscan.errors import SequenceError, UnsupportedModelError
from headscan.gradients.example_losses import Loss, reduced
from headscan.models.forward_inputs import batch_kwargs, real_tokens
from headscan.models.loaded_model import LoadedModel
from headscan.models.logits import logits_at


@dataclass(frozen=True)
class PaddedTextLoss(Loss):
    """The loss of a model that reads each text once, with a padding mask.

    Attributes:
        ids: Token ids (B, N), padded on the right.
        lengths: Real tokens of each sequence (B,).
    """

    ids: Tensor
    lengths: Tensor

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return batch_kwargs(self.ids, self.lengths, causal=False)

    @property
    def texts(self) -> Mapping[str, Any]:
        return {"input_ids": self.ids, "lengths": self.lengths}


@dataclass(frozen=True)
class MaskedTokenLoss(PaddedTextLoss):
    """The loss of an encoder that predicts masked tokens.

    Attributes:
        ids: Token ids (B, N) with the mask token at the scored places, padded on the right.
        rows, columns: The scored places.
        targets: Their true token ids.
        summed: The loss of a sequence is the sum over its scored tokens instead of the mean.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    targets: Tensor
    summed: bool = False

    @classmethod
    def of(
        cls,
        ids: Tensor,
        lengths: Sequence[int],
        mask_id: int,
        *,
        never: Sequence[int] = (),
        share: float = 0.15,
        keys: Sequence[int] | None = None,
        seed: int = 0,
        summed: bool = False,
    ) -> MaskedTokenLoss:
        """Mask a share of each sequence's tokens, at least one.

        The places depend on the seed, the key and the tokens of the sequence, not on the batch.

        Args:
            ids: Token ids (B, N) on the model's input device, padded on the right.
            lengths: Real tokens of each sequence.
            mask_id: Id of the mask token.
            never: Ids of tokens that are not masked, such as separators.
            share: Share of masked tokens, above 0, at most 1.
            keys: An integer of 0 or more for each sequence; None uses the row numbers.
            seed: Seed of the places, at least 0.
            summed: The loss of a sequence is the sum over its masked tokens instead of the mean.

        Raises:
            SequenceError: ``share`` is out of range, or a sequence has no token that may be masked.
        """
        if not 0 < share <= 1:
            raise SequenceError(f"share of masked tokens: {share} (limit above 0, at most 1). Change `share`")
        rows: list[int] = []
        columns: list[int] = []
        on_cpu = ids.cpu().numpy()
        for row, (length, key) in enumerate(zip(lengths, range(len(ids)) if keys is None else keys, strict=True)):
            free = np.flatnonzero(~np.isin(on_cpu[row, :length], list(never)))
            if not len(free):
                raise SequenceError(f"sequence {row} has no token to mask: {length} tokens (at least 1). Leave it out")
            count = max(1, round(share * len(free)))
            chosen = np.sort(np.random.default_rng([seed, key]).choice(free, count, replace=False))
            rows += [row] * count
            columns += chosen.tolist()
        masked = ids.clone()
        masked[rows, columns] = mask_id
        real = torch.tensor(list(lengths), device=ids.device)
        return cls(masked, real, tuple(rows), tuple(columns), ids[rows, columns], summed)

    def losses(self, lm: LoadedModel) -> Tensor:
        mask = self.inputs["attention_mask"]
        logits_MV = logits_at(lm, self.ids, list(self.rows), list(self.columns), attention_mask=mask)
        return reduced(logits_MV, self.targets, self.rows, len(self.ids), summed=self.summed)


@dataclass(frozen=True)
class TargetTextLoss(Loss):
    """The loss of an encoder-decoder on target texts.

    Attributes:
        ids: Token ids of the encoder (B, N), padded on the right.
        lengths: Their real tokens (B,).
        labels: Token ids of the target texts (B, M), padded on the right.
        label_lengths: Their real tokens (B,).
        start_id: The token before the first target token.
        summed: The loss of a sequence is the sum over its target tokens instead of the mean.
    """

    ids: Tensor
    lengths: Tensor
    labels: Tensor
    label_lengths: Tensor
    start_id: int
    summed: bool = False

    @classmethod
    def of(
        cls,
        lm: LoadedModel,
        ids: Tensor,
        lengths: Sequence[int],
        labels: Tensor,
        label_lengths: Sequence[int],
        *,
        summed: bool = False,
    ) -> TargetTextLoss:
        """Score all tokens of the target texts.

        Raises:
            UnsupportedModelError: The model has no start token of the decoder.
        """
        configs = (lm.model.config, lm.model.generation_config)
        starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
        start = next((start for start in (*starts, lm.model.config.pad_token_id) if start is not None), None)
        if start is None or not 0 <= start < lm.vocab_size:
            raise UnsupportedModelError(
                f"{lm.source} has no first token of the decoder: {start} (limit {lm.vocab_size - 1}). Set "
                "decoder_start_token_id in config.json"
            )
        real, label_real = (torch.tensor(list(each), device=ids.device) for each in (lengths, label_lengths))
        return cls(ids, real, labels.to(ids.device), label_real, int(start), summed)

    @property
    def decoder_ids(self) -> Tensor:
        """Inputs of the decoder (B, M): the target texts, one token later."""
        return torch.cat([torch.full_like(self.labels[:, :1], self.start_id), self.labels[:, :-1]], 1)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return {
            **batch_kwargs(self.ids, self.lengths, causal=False, decoder_input_ids=self.decoder_ids),
            "decoder_attention_mask": real_tokens(self.label_lengths, self.labels.shape[1]).long(),
        }

    @property
    def texts(self) -> Mapping[str, Any]:
        own = {"input_ids": self.ids, "lengths": self.lengths}
        return {**own, "decoder_input_ids": self.decoder_ids, "decoder_lengths": self.label_lengths}

    def losses(self, lm: LoadedModel) -> Tensor:
        rows, columns = real_tokens(self.label_lengths, self.labels.shape[1]).nonzero(as_tuple=True)
        logits_BMV = lm.model(**self.inputs, use_cache=False).logits
        chosen = logits_BMV[rows.to(logits_BMV.device), columns.to(logits_BMV.device)]
        return reduced(chosen, self.labels[rows, columns], rows.tolist(), len(self.ids), summed=self.summed)


@dataclass(frozen=True)
class ClassificationLoss(PaddedTextLoss):
    """The loss of a sequence classifier.

    Attributes:
        labels: Class of each sequence (B,).
    """

    labels: Tensor

    @classmethod
    def of(cls, lm: LoadedModel, ids: Tensor, lengths: Sequence[int], labels: Sequence[int]) -> ClassificationLoss:
        """Check labels.

        Raises:
            UnsupportedModelError: The model has no classes.
            SequenceError: A label is missing or is not a class of the model.
        """
        if "ForSequenceClassification" not in type(lm.model).__name__:
            raise UnsupportedModelError(
                f"{lm.source} is a {type(lm.model).__name__}, not a sequence classifier. Load a model with a "
                "classification head"
            )
        classes = int(lm.model.config.num_labels or 0)
        if len(labels) != len(ids) or not all(0 <= label < classes for label in labels):
            raise SequenceError(
                f"labels {list(labels)[:8]} of {len(ids)} sequences (limit 0 to {classes - 1}). Give one class for each"
            )
        real = torch.tensor(list(lengths), device=ids.device)
        return cls(ids, real, torch.tensor(list(labels), device=ids.device))

    def losses(self, lm: LoadedModel) -> Tensor:
        logits_BC = lm.model(**self.inputs).logits
        return reduced(logits_BC, self.labels, range(len(self.ids)), len(self.ids), summed=True)
