"""Settings of what leaves headscan: pruned models and plans of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from headscan.errors import PruningError
from headscan.kv.kept_keys import Window, checked_window
from headscan.options import Option
from headscan.pipelines.settings.corpus_settings import CorpusSpec, longest_text

if TYPE_CHECKING:
    from headscan.pipelines.runs.run_records import ModelIdentity

#: Shortest text of a calibration, in tokens.
SHORTEST = 16


@dataclass(frozen=True)
class TextConfig:
    """Texts of a pruning.

    Attributes:
        held_out: Text that judges the result; None splits the documents of ``corpus`` into halves with about as many
            texts. A corpus of one document is split in the middle.
        sequences: Number of texts; one half chooses and repairs, the other judges.
    """

    corpus: CorpusSpec = field(default_factory=lambda: CorpusSpec("python-stdlib"))
    held_out: CorpusSpec | None = None
    sequences: int = 256
    max_tokens: Annotated[
        int | None, Option("length of texts in tokens (default: the model's context, at most 2048)", least=1)
    ] = None

    def __post_init__(self) -> None:
        if self.sequences < 2:
            raise PruningError(f"sequences={self.sequences} (limit 2, one to repair and one held out). Raise it")
        if self.max_tokens is not None and self.max_tokens < SHORTEST:
            raise PruningError(f"max_tokens={self.max_tokens} (limit {SHORTEST}). Raise `max_tokens`")

    def tokens(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens)


@dataclass(frozen=True)
class RecallConfig:
    """Recall prompts of a pruning, in addition to its texts: text alone does not show which heads copy and retrieve.

    Attributes:
        prompts: Number of prompts of each recall task, a multiple of 8; one half chooses and repairs, the other judges.
            0 uses texts only.
        tokens: Longest prompt; shorter if the model's context is.
        weight: w of the objective m(text) + w / T sum over the T recall tasks of m(task); m is the mean over
            predictions.
    """

    prompts: int = 32
    tokens: int = 512
    weight: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompts < 0 or self.prompts % 8:
            raise PruningError(f"recall prompts: {self.prompts} (limit 0 or a multiple of 8). Change `prompts`")
        if not 0 < self.weight < math.inf:
            raise PruningError(f"recall weight: {self.weight:g} (limit above 0). Raise `weight`, or set `prompts` to 0")


#: Projections that each repair solves; ``mean`` adds the mean outputs of removed heads instead.
REPAIRS: Mapping[str, tuple[Literal["o", "v", "down"], ...]] = {
    "none": (),
    "mean": (),
    "o": ("o",),
    "o+v": ("o", "v"),
    "o+down": ("o", "down"),
    "o+v+down": ("o", "v", "down"),
}


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of a damage measurement.

    Attributes:
        corpus: Ordinary text.
        sink: First tokens of a window.
        recents: Widths of recent tokens; each KV head gets the narrowest that costs hardly more than the widest.
        gates: Values of the gates of `kv_damages`.
        seed: Seed of the recall prompts.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        PlanError: A number is out of range.
        PlanMismatchError: A window is out of range.
    """

    corpus: CorpusSpec = field(default_factory=lambda: CorpusSpec("python-stdlib"))
    sink: int = 4
    recents: tuple[int, ...] = (256,)
    max_tokens: Annotated[
        int | None,
        Option("length of texts and recall prompts in tokens (default: the model's context, at most 2048)", least=1),
    ] = None
    sequences: Annotated[int, Option("number of texts; one half is held out to measure the plan", least=1)] = 64
    recall_prompts: Annotated[
        int,
        Option("number of needle and of copying prompts, a multiple of 8; 0 measures text only", metavar="N", least=0),
    ] = 32
    gates: tuple[float, ...] = (0.5,)
    confirm: Annotated[
        bool, Option("choose the KV heads near the budget's edge by their loss with real window masks")
    ] = True
    seed: int = 0
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        from headscan.analysis.plans import PlanError

        if not self.recents:
            raise PlanError("recent names no width. Give at least one")
        for recent in self.recents:
            checked_window(self.sink, recent)
        if self.sequences < 2:
            raise PlanError(f"sequences={self.sequences} (limit 2, one to measure and one held out). Raise `sequences`")
        if self.recall_prompts < 0 or self.recall_prompts % 8:
            raise PlanError(f"recall_prompts={self.recall_prompts} (limit 0 or a multiple of 8). Change it")

    @property
    def windows(self) -> tuple[Window, ...]:
        """Windows, narrowest first."""
        return tuple(Window(self.sink, recent) for recent in sorted(set(self.recents)))

    def tokens(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens)


@dataclass(frozen=True)
class LossLimit:
    """Budget: the most windows that add at most ``max_loss`` nats per scored token, on text and on each recall task.
    The prompts are those that rank the heads; on held-out prompts the increase may be larger.
    """

    max_loss: float

    def __post_init__(self) -> None:
        from headscan.analysis.plans import PlanError

        if not self.max_loss > 0:
            raise PlanError(f"max_loss out of range: {self.max_loss:g} (limit above 0). Raise `max_loss`")

    def allows(self, increases: Mapping[str, float]) -> bool:
        return max(increases.values()) <= self.max_loss
