"""Running a model with heads ablated.

The whole output of an ablated head is replaced, for all tokens, before the output projection: by zero unless the
ablation names another value. Nothing is renormalised (arXiv 2504.03889, 1905.10650).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.models.loaded_model import LoadedModel


@contextmanager
def intervene(
    lm: LoadedModel,
    what: Ablation,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    keys: Tensor | Sequence[int] | None = None,
) -> Iterator[InterventionRecord]:
    """Ablate heads while the context is open; contexts nest, also inside and around `collect`.

    Args:
        lm: A model from `headscan.load`.
        what: A `HeadMask`, `HeadRule` or `RandomHeads`.
        lengths: Real tokens (B,) of each sequence of the next batch, read by rules only. None takes them from the
            padding mask of the pass, or from `collect` if that runs it; without either all tokens are real.
        keys: Integers (B,) of 0 or more that seed random heads and samples of each sequence; None uses the row numbers.

    Raises:
        HeadIndexError: The mask contains a head that the model lacks.
        InterventionError: A rule is applied to cross attention; in a pass: lengths or keys do not fit the batch, or a
            rule's padding mask contradicts the lengths or is not padded on the right.
        SequenceError: In a pass with a rule: sequences of the batch need different rotary frequencies.
        UnsupportedModelError: The model is compiled or in train mode.
    """
    record = InterventionRecord(lm, lengths, keys)
    with what.hooks(lm, record):
        yield record
