"""The texts on which heads are chosen and projections repaired.

Shapes: B sequences, N tokens (padded on the right).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.errors import SequenceError
from headscan.models.forward_inputs import real_tokens
from headscan.options import BATCH_TOKENS

#: Part of the tokens of a pass that a pass takes if all its logits are kept: they are far wider than hidden states.
_KEPT_LOGITS = 4


@dataclass(frozen=True)
class CalibrationBatch:
    """Sequences of one forward pass: ids (B, N), padded on the right, and their real tokens (B,).

    Attributes:
        scoring_BN: The tokens whose predictions of the next token count, bool (B, N).
        weights: Weight of each counted prediction of a sequence, float32 (B,).
    """

    ids: Tensor
    lengths: Tensor
    scoring_BN: Tensor
    weights: Tensor

    @property
    def real_BN(self) -> Tensor:
        """The real tokens, bool (B, N)."""
        return real_tokens(self.lengths, self.ids.shape[1])

    @property
    def weights_M(self) -> Tensor:
        """Weight of each counted prediction, in the order of `scoring_BN`."""
        return self.weights.repeat_interleave(self.scoring_BN.sum(1))

    @property
    def weights_BN(self) -> Tensor:
        """Weight of each token's activations (B, N): that of its prediction if it counts, else 1; 0 at padding."""
        return torch.where(self.scoring_BN, self.weights[:, None], self.real_BN.float())

    def by_token(self, values: Tensor) -> Tensor:
        """Return values as (B, N, ...), also from modules that are called with flat tokens."""
        return values.reshape(*self.ids.shape, -1)


@dataclass(frozen=True)
class Calibration:
    """Token ids (B, N), padded on the right, of texts and recall prompts, at most a few thousand tokens in each pass.

    Attributes:
        batch_tokens: Tokens of one forward pass, padding included.
        scoring_BN: The tokens whose predictions of the next token count, bool (B, N); None counts all that have one.
        weights: Weight of each counted prediction of a sequence (B,); None weighs all alike.
    """

    ids: Tensor
    lengths: Tensor
    batch_tokens: int = BATCH_TOKENS
    scoring_BN: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.lengths.shape != self.ids.shape[:1]:
            raise SequenceError(
                f"shapes do not fit: ids {tuple(self.ids.shape)}, lengths {tuple(self.lengths.shape)}. Pass ids (B, N) "
                "and lengths (B,)"
            )
        if not len(self.ids) or int(self.lengths.min()) < 2 or int(self.lengths.max()) > self.ids.shape[1]:
            raise SequenceError(
                f"{len(self.ids)} calibration sequences with lengths outside 2 to {self.ids.shape[1]}. Pass at least "
                "one, each with two tokens or more"
            )

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def predictions(self) -> Tensor:
        """Counted predictions of each sequence (B,)."""
        return self._counted.sum(1)

    @property
    def _counted(self) -> Tensor:
        return real_tokens(self.lengths - 1, self.ids.shape[1]) if self.scoring_BN is None else self.scoring_BN

    @property
    def for_logits(self) -> Calibration:
        """The same sequences in shorter passes, whose logits fit into memory together."""
        return replace(self, batch_tokens=self.batch_tokens // _KEPT_LOGITS)

    def with_prompts(self, prompts: Sequence[Calibration], weight: float) -> Calibration:
        """Return these texts with the prompts of recall tasks spread evenly among them, so that `first` and `split`
        take both. The tasks share ``weight``, that of their mean prediction next to that of a text's mean prediction.
        """
        parts = [self, *prompts]
        if any(each.weights is not None for each in parts):
            raise SequenceError("texts or prompts have weights already. Pass those without `weights`")
        totals = [int(each.predictions.sum()) for each in parts]
        shares = [1.0] + [weight * totals[0] / (len(prompts) * total) for total in totals[1:]]
        places = torch.cat([(torch.arange(len(each.ids)) + 0.5) / len(each.ids) for each in parts])
        order = places.argsort(stable=True)
        width = max(each.ids.shape[1] for each in parts)
        return Calibration(
            torch.cat([F.pad(each.ids, (0, width - each.ids.shape[1])) for each in parts])[order],
            torch.cat([each.lengths for each in parts])[order],
            self.batch_tokens,
            torch.cat([F.pad(each._counted, (0, width - each.ids.shape[1])) for each in parts])[order],
            torch.cat([torch.full((len(each.ids),), share) for each, share in zip(parts, shares, strict=True)])[order],
        )

    def first(self, tokens: int) -> Calibration:
        """Return the first sequences with at least so many tokens together; all if they have fewer."""
        count = int((self.lengths.cumsum(0) < tokens).sum()) + 1
        return self._of_rows(slice(0, count))

    def split(self, tokens: int) -> tuple[Calibration, Calibration]:
        """Return the last sequences with at least so many tokens together, after all others, which are one or more. A
        single text is cut in two; one of at most three tokens, or a prompt, is both parts.
        """
        if len(self.ids) > 1:
            count = int((self.lengths.flip(0).cumsum(0) < tokens).sum()) + 1
            at = max(1, len(self.ids) - count)
            return self._of_rows(slice(0, at)), self._of_rows(slice(at, None))
        length = int(self.lengths)
        if length < 4 or self.scoring_BN is not None:
            return self, self
        at = length - min(max(2, tokens), length - 2)
        return (
            Calibration(self.ids[:, :at], torch.tensor([at]), self.batch_tokens),
            Calibration(self.ids[:, at:length], torch.tensor([length - at]), self.batch_tokens),
        )

    def _of_rows(self, rows: slice) -> Calibration:
        return Calibration(
            self.ids[rows],
            self.lengths[rows],
            self.batch_tokens,
            None if self.scoring_BN is None else self.scoring_BN[rows],
            None if self.weights is None else self.weights[rows],
        )

    def batches(self, device: torch.device) -> Iterator[CalibrationBatch]:
        """Yield the batches, each cut to its longest sequence."""
        count = max(1, self.batch_tokens // self.ids.shape[1])
        weights = torch.ones(len(self.ids)) if self.weights is None else self.weights
        for start in range(0, len(self.ids), count):
            rows = slice(start, start + count)
            lengths, counted = self.lengths[rows], self._counted[rows]
            longest = int(lengths.max())
            parts = (self.ids[rows, :longest], lengths, counted[:, :longest], weights[rows])
            yield CalibrationBatch(*(each.to(device) for each in parts))
