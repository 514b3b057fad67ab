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

#: Tokens that a tokenizer adds to a text, at most.
_MOST_ADDED = 4


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
    for place, (text, row) in enumerate(zip(given, rows, strict=True)):
        if not row or (isinstance(text, str) and _only_special(lm, text, len(row))):
            raise SequenceError(f"sequence {place} has no token of its own: {text!r}. Leave it out")
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.as_tensor(row)
    return ids, list(map(len, rows))


def _only_special(lm: LoadedModel, text: str, tokens: int) -> bool:
    """Return True if a text has only the tokens that the tokenizer adds to every text."""
    if tokens > _MOST_ADDED:
        return False
    return not lm.require_tokenizer()(text, add_special_tokens=False)["input_ids"]
