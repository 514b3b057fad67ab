"""Token ids from tensors, arrays, lists and texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headscan.errors import SequenceError
from headscan.models.loaded_model import LoadedModel

#: Token ids (B, N), or B texts or lists of ids of any lengths.
TokenIds = Tensor | np.ndarray | Sequence[str] | Sequence[Sequence[int]]


def token_ids(
    lm: LoadedModel, given: TokenIds, lengths: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor | Sequence[int] | None]:
    """Return token ids (B, N), padded on the right, and their lengths (B,).

    Texts are tokenized with the model's own special tokens.

    Args:
        lengths: Real tokens of each row of a tensor or an array; None for texts and lists, which have their own.

    Raises:
        SequenceError: Not integers, an empty text or list, or lengths next to texts or lists.
        ModelLoadError: Texts for a model without tokenizer.
    """
    if isinstance(given, str):
        raise SequenceError(f"input_ids is one text: {given[:20]!r}. Pass a list of texts")
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given) if given.dtype.kind in "iu" else given
    if isinstance(given, Tensor):
        return given, lengths
    if not isinstance(given, Sequence) or not given or not all(isinstance(row, str | Sequence) for row in given):
        raise SequenceError(
            "input_ids is no integer array of shape (sequences, tokens). Pass torch.tensor(ids) or a list of texts"
        )
    if lengths is not None:
        raise SequenceError("lengths are given next to texts or lists, which have their own. Leave out lengths")
    rows = [lm.require_tokenizer()(row)["input_ids"] if isinstance(row, str) else list(row) for row in given]
    if not all(rows):
        raise SequenceError(f"sequence {[bool(row) for row in rows].index(False)} has no token. Leave it out")
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.as_tensor(row)
    return ids, list(map(len, rows))
