"""Random texts for choices and repairs on small models."""

from __future__ import annotations

import torch

from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration


def random_texts(lm: LoadedModel, sequences: int = 12, tokens: int = 40, seed: int = 0) -> Calibration:
    """Return random token ids of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, lm.vocab_size, (sequences, tokens), generator=generator)
    lengths = torch.randint(tokens // 2, tokens + 1, (sequences,), generator=generator)
    return Calibration(ids, lengths, batch_tokens=5 * tokens)
