"""Losses of the sequences of a batch, which backward passes start from.

A decoder's losses come from the output of its last block without all logits at once: the model's own final norm, head
and logit scaling run on a part of the tokens at a time. Encoders, encoder-decoders and classifiers have losses of their
own.

Shapes: B sequences, N tokens, E width of a hidden state, M scored tokens or tokens of the decoder, V vocabulary, C
classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from headscan.errors import SequenceError, UnsupportedModelError
from headscan.layers.blocks import Blocks
from headscan.models.forward_inputs import batch_kwargs, before_last, real_tokens, widened, without_autocast
from headscan.models.loaded_model import LoadedModel, logits_at

#: Logits in memory at one time.
LOGITS = 1 << 25


@contextmanager
def tail_only(blocks: Blocks, hidden: Tensor) -> Iterator[None]:
    """Let passes without a KV cache skip all blocks and go on with ``hidden`` (B, N, E), the last one's output."""
    with ExitStack() as changes:
        for block in blocks.all:
            changes.enter_context(block.skipped())

        def replace(own: Tensor, _: Cache | None) -> Tensor:
            return hidden.to(own.device)

        changes.enter_context(blocks.all[-1].watched(replace))
        yield


class Loss(ABC):
    """One loss for each sequence of ids (B, N), padded on the right, with real tokens ``lengths`` (B,)."""

    ids: Tensor
    lengths: Any

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Arguments of the forward pass, by name."""
        return {"input_ids": self.ids}

    @property
    def texts(self) -> Mapping[str, Any]:
        """Arguments of `collect` for the same forward pass, by name."""
        return {"input_ids": self.ids, "lengths": self.lengths}

    @property
    def scale(self) -> float:
        """Factor of all derivatives inside a backward pass: float16 rounds small ones to zero."""
        return 1.0

    @abstractmethod
    def losses(self, lm: LoadedModel) -> Tensor:
        """Run the model and return the losses (B,) in nats, float32 or wider, with their graph."""

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        """Return the derivative (B, N, E) of the summed losses by the output of the last block, times `scale`."""
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad(), tail_only(blocks, leaf):
            (self.losses(blocks.lm).sum() * self.scale).backward()
        assert leaf.grad is not None
        return leaf.grad


@dataclass(frozen=True)
class NextTokenLoss(Loss):
    """The loss of a decoder's scored tokens; a backward pass computes logits a part of the tokens at a time.

    Attributes:
        counts: Number of scored tokens of each sequence, its last ones.
        rows, columns: Places of the predicting logits, M each.
        summed: The loss of a sequence is the sum over its scored tokens instead of the mean.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: bool = False

    @classmethod
    def of(
        cls, ids: Tensor, lengths: Sequence[int], scored: Sequence[int] | None = None, *, summed: bool = False
    ) -> NextTokenLoss:
        """Score the last ``scored`` tokens of each sequence of ids (B, N); None scores all but the first."""
        counts = tuple(length - 1 for length in lengths) if scored is None else tuple(scored)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 1 <= count < length:
                raise SequenceError(
                    f"scored tokens of sequence {row}: {count} (limit 1 to {length - 1}). Score fewer, and never the "
                    "first token"
                )
        scoring_BN = before_last(torch.tensor(list(lengths)), torch.tensor(counts), ids.shape[1])
        return cls.at(ids, lengths, scoring_BN, summed=summed)

    @classmethod
    def at(cls, ids: Tensor, lengths: Sequence[int], scoring_BN: Tensor, *, summed: bool = False) -> NextTokenLoss:
        """Score the tokens after those of a mask (B, N), one or more in each sequence."""
        rows, columns = (tuple(each.tolist()) for each in scoring_BN.nonzero(as_tuple=True))
        return cls(ids, tuple(lengths), tuple(scoring_BN.sum(1).tolist()), rows, columns, summed)

    @property
    def scale(self) -> float:
        # A mean over many tokens has derivatives that float16 rounds to zero.
        return 1 if self.summed else max(self.counts)

    def losses(self, lm: LoadedModel) -> Tensor:
        return self._share(lm, slice(0, len(self.rows)), 1)

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        lm, leaf = blocks.lm, hidden.detach().requires_grad_()
        size = max(16, LOGITS // lm.vocab_size)
        with torch.enable_grad(), tail_only(blocks, leaf), without_autocast(lm.device):
            for start in range(0, len(self.rows), size):
                self._share(lm, slice(start, start + size), self.scale).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def _share(self, lm: LoadedModel, part: slice, scale: float) -> Tensor:
        """Run the model and return the share of some scored tokens in the losses (B,), times ``scale``, on the CPU."""
        rows, columns = list(self.rows[part]), list(self.columns[part])
        logits_MV = logits_at(lm, self.ids, rows, columns, use_cache=False)
        targets = self.ids[rows, [column + 1 for column in columns]].to(logits_MV.device)
        loss_M = F.cross_entropy(widened(logits_MV), targets, reduction="none").cpu()
        if not self.summed:
            counts = torch.tensor(self.counts, dtype=torch.float64)
            loss_M = loss_M * (scale / counts)[rows].to(loss_M.dtype)
        return torch.zeros(len(self.counts), dtype=loss_M.dtype).index_add(0, torch.tensor(rows), loss_M)


def reduced(logits_MV: Tensor, targets_M: Tensor, rows: Sequence[int], sequences: int, *, summed: bool) -> Tensor:
    """Return the mean or summed cross-entropy of each sequence's tokens, one or more, (B,), float32 or wider."""
    wide = widened(logits_MV)
    loss_M = F.cross_entropy(wide, targets_M.to(wide.device), reduction="none")
    at = torch.tensor(rows, device=wide.device)
    total_B = loss_M.new_zeros(sequences).index_add(0, at, loss_M)
    return total_B if summed else total_B / torch.bincount(at, minlength=sequences)


@dataclass(frozen=True)
class PaddedTextLoss(Loss):
    """The loss of a model that reads each text once, ids (B, N) padded on the right, with a padding mask."""

    ids: Tensor
    lengths: Tensor

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return batch_kwargs(self.ids, self.lengths, causal=False)


@dataclass(frozen=True)
class MaskedTokenLoss(PaddedTextLoss):
    """The loss of an encoder that predicts the masked tokens at ``rows`` and ``columns``, a mean or a sum."""

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
        input_keys: Sequence[int] | None = None,
        seed: int = 0,
        summed: bool = False,
    ) -> MaskedTokenLoss:
        """Mask a share of each sequence's tokens, above 0 and at most 1, at least one token, but none with an id in
        ``never``, such as separators. The places depend on the seed, the key (None: the row) and the tokens of the
        sequence, not on the batch.
        """
        if not 0 < share <= 1:
            raise SequenceError(f"share of masked tokens: {share} (limit above 0, at most 1). Change `share`")
        rows: list[int] = []
        columns: list[int] = []
        on_cpu = ids.cpu().numpy()
        keys = range(len(ids)) if input_keys is None else input_keys
        for row, (length, key) in enumerate(zip(lengths, keys, strict=True)):
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
    """The loss of an encoder-decoder that reads ids (B, N) on target texts (B, M), padded on the right."""

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
        start = lm.decoder_start_id
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
        return {**super().texts, "decoder_input_ids": self.decoder_ids, "decoder_lengths": self.label_lengths}

    def losses(self, lm: LoadedModel) -> Tensor:
        rows, columns = real_tokens(self.label_lengths, self.labels.shape[1]).nonzero(as_tuple=True)
        logits_BMV = lm.model(**self.inputs, use_cache=False).logits
        chosen = logits_BMV[rows.to(logits_BMV.device), columns.to(logits_BMV.device)]
        return reduced(chosen, self.labels[rows, columns], rows.tolist(), len(self.ids), summed=self.summed)


@dataclass(frozen=True)
class ClassificationLoss(PaddedTextLoss):
    """The loss of a sequence classifier; labels (B,) are the classes of sequences. The token types (B, N) tell the two
    texts of a pair apart; None uses the model's default, one text.
    """

    labels: Tensor
    token_type_ids: Tensor | None = None

    @classmethod
    def of(
        cls,
        lm: LoadedModel,
        ids: Tensor,
        lengths: Sequence[int],
        labels: Sequence[int],
        *,
        token_type_ids: Tensor | None = None,
    ) -> ClassificationLoss:
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
        types = None if token_type_ids is None else token_type_ids.to(ids.device)
        return cls(ids, real, torch.tensor(list(labels), device=ids.device), types)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        types = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        return {**super().inputs, **types}

    @property
    def texts(self) -> Mapping[str, Any]:
        return {**super().texts, "token_type_ids": self.token_type_ids}

    def losses(self, lm: LoadedModel) -> Tensor:
        logits_BC = lm.model(**self.inputs).logits
        return reduced(logits_BC, self.labels, range(len(self.ids)), len(self.ids), summed=True)
