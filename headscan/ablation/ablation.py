"""The base class of ablations, and running a model with heads ablated.

The whole output of an ablated head is replaced, for all tokens, before the output projection: by zero unless the
ablation names another value. Nothing is renormalised (arXiv 2504.03889, 1905.10650). Another ablation is a subclass in
a file of this folder, and an entry in ``headscan.__init__``.

Shapes: B sequences, H query heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import Cache

from headscan.ablation.record import InterventionRecord
from headscan.ablation.replacements import ZERO, Replacement
from headscan.catalog import Value
from headscan.errors import InterventionError
from headscan.models.loaded_model import LoadedModel

if TYPE_CHECKING:
    from headscan.ablation.record import InterventionRecord
    from headscan.grid import AttentionSite, Head, HeadGrid
    from headscan.models.loaded_model import LoadedModel


class Ablation(ABC):
    """Heads whose output is replaced while a model runs; immutable, hashable and picklable."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for messages."""

    @abstractmethod
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        """Return a context in which the model runs with the heads ablated.

        Args:
            lm: The model.
            record: Read for lengths and keys, and updated after each layer.
        """

    @property
    def replaces_by(self) -> Replacement:
        """What takes the place of an ablated head's output."""
        return ZERO

    @property
    def value(self) -> Value:
        """Name of the tested value: zero tests whether heads are inactive, mean whether they are constant."""
        return self.replaces_by.value

    def check_values(self, grid: HeadGrid) -> None:
        """Raise if the values do not fit the heads that may be ablated."""
        fixed = self.fixed_heads
        layers = {site.layer for site in grid.sites} if fixed is None else {head.layer for head in fixed}
        self.replaces_by.check(grid, sorted(layers))

    @property
    def fixed_heads(self) -> tuple[Head, ...] | None:
        """Ablated heads, if they are the same for every input; otherwise None."""
        return None

    @property
    def fixed(self) -> bool:
        """True if the same heads are ablated for every input."""
        return self.fixed_heads is not None

    @property
    def first_layer(self) -> int | None:
        """The lowest layer with an ablated head; None if there is none, or if it depends on the input."""
        return min((head.layer for head in self.fixed_heads or ()), default=None)

    @property
    def needs_whole_input(self) -> bool:
        """True if heads depend on attention over the full sequence: it uses the rule kernels, never a KV cache."""
        return False

    @property
    def replaces_attention(self) -> bool:
        """True if attention runs in other kernels than the model's own, which round differently."""
        return not self.fixed

    @property
    def evicts(self) -> bool:
        """True if continuations are read from a KV cache that has lost keys, see `new_cache`."""
        return False

    def new_cache(self, lm: LoadedModel, *, context: bool = True) -> Cache:
        """Return an empty KV cache that evicts keys.

        Args:
            lm: The model.
            context: The first pass reads a context, with full attention, and keys are evicted after it. False evicts
                keys from the first token on.
        """
        raise InterventionError(f"{self.label} does not evict keys. Use the model's own KV cache")

    @property
    def may_share_prefix(self) -> bool:
        """True if inputs with a common prefix may continue from one KV cache of it."""
        return self.fixed and self.replaces_by.position_free

    @property
    def may_share_rows(self) -> bool:
        """True if inputs with a common prefix may share one row, decided layer by layer with `heads_at`."""
        return False

    @property
    def score_name(self) -> str | None:
        """The score that decides which heads are ablated; None if no score does."""
        return None

    @property
    def score_threshold(self) -> float | None:
        """The threshold of `score_name`; None if no score decides."""
        return None

    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None) -> Tensor:
        """Return which heads are ablated in one layer: bool (H,) or (B, H).

        Args:
            site: The layer's attention.
            scores_BH: Scores named `score_name`; None if it is None.
        """
        raise InterventionError(f"{self.label} cannot be decided layer by layer. Run each input in a row of its own")

    def within(self, first: int, last: int) -> Ablation:
        """Return the part of the ablation that concerns the layers ``first`` to ``last - 1``."""
        return self


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
