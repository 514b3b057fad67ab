"""Settings of measurements: scans, importances, probes and gates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from headscan.catalog import (
    BEHAVIOURS,
    PROFILES,
    RECALL_NAMES,
    STATISTICS,
    MassWidths,
    Panel,
    check_statistics,
    panel_names,
)
from headscan.errors import GateError, HeadscanError
from headscan.gates.gate_settings import GateFitConfig
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS, Count, Group, Limits, Option, check_limits
from headscan.settings.corpus_settings import SHORTEST, CorpusSpec, ExamplesSpec, TokenConfig

#: Attention that is named on the command line.
Site = Annotated[Literal["self", "encoder", "cross", "merged"], Option("attention of the layer")]
#: Option of every run over a corpus or over labelled examples.
_ShardSize = Annotated[
    int | None,
    Option(
        "number of sequences stored and resumed together (default: about 20 s of work by the sizes of model and texts,"
        " and 16 for a part of a corpus)",
        least=1,
    ),
]


class CorpusRunError(HeadscanError):
    """Settings of a run over a corpus that are out of range."""


@dataclass(frozen=True)
class Part:
    """One of ``of`` equal parts of a corpus: every shard whose index is ``number - 1`` modulo ``of``."""

    number: Count
    of: Count

    def __post_init__(self) -> None:
        check_limits(self, CorpusRunError)
        if self.number > self.of:
            raise CorpusRunError(f"`part={self}` (limit 1/{self.of} to {self.of}/{self.of}). Change `part`")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def __contains__(self, shard: int) -> bool:
        return shard % self.of == self.number - 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part that a text such as ``3/8`` names."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise CorpusRunError(f"{text!r} is no part of a corpus: write 1/8 to 8/8 for eight parts")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class CorpusRunConfig:
    """Settings of every run over a corpus. ``shard_size`` sequences are stored and resumed together; None chooses about
    20 s of work when the run begins, and 16 sequences for a part of the corpus.
    """

    model: ModelSpec
    corpus: CorpusSpec
    tokens: TokenConfig
    shard_size: _ShardSize = field(default=None, kw_only=True)
    batch_tokens: Count = field(default=BATCH_TOKENS, kw_only=True)

    def __post_init__(self) -> None:
        check_limits(self, CorpusRunError)


@dataclass(frozen=True)
class ScanConfig(CorpusRunConfig):
    """Settings of a scan, in addition to those of every run over a corpus.

    Attributes:
        statistics: Names of statistics and profiles; empty uses those of the panel.
        widths: Widths of sink and recent mass.
        part: Measured part of the corpus; None measures all of it. The run is the same one for all parts.

    Raises:
        UnknownNameError: A statistic is not in the catalogue.
        CorpusRunError: The panel is unknown, or a size is below 1.
    """

    panel: Annotated[
        Panel,
        Option(
            "fast: statistics from fused attention; full: also statistics and profiles that need the attention weights",
            one_of="statistics",
        ),
    ] = "fast"
    statistics: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated statistics instead of a panel: {', '.join((*STATISTICS, *PROFILES))}",
            kind="statistic",
            names=(*STATISTICS, *PROFILES),
            one_of="statistics",
        ),
    ] = ()
    keep_nonfinite: Annotated[
        bool, Option("NaN and infinite values stored as NULL (default: such a value ends the scan)")
    ] = False
    widths: Annotated[MassWidths, Group()] = field(default_factory=MassWidths)
    part: Annotated[
        Part | None,
        Option(
            "part of the corpus, such as 3/8: every eighth shard, from the third on; `headscan merge` joins the stores "
            "of all parts (default: the whole corpus)",
            metavar="N/PARTS",
            parse=Part.parse,
        ),
    ] = None

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the measured statistics and profiles, sorted."""
        return tuple(sorted(check_statistics(self.statistics or panel_names(self.panel))))


#: Prompts of each recall task that measure ``importance_recall`` where no setting states another number.
RECALL_PROMPTS = 16
#: Loss of a sequence: the mean or the sum of the losses of its tokens.
LossReduction = Literal["mean", "sum"]
_Reduced = Annotated[LossReduction, Option("loss of a sequence: mean or sum of the losses of its tokens")]


@dataclass(frozen=True)
class ImportanceConfig(CorpusRunConfig):
    """Settings of an importance run, in addition to those of every run over a corpus."""

    reduction: _Reduced = "mean"
    recall_prompts: Annotated[
        int,
        Option(
            f"number of prompts of each recall task ({RECALL_NAMES}), a multiple of 4, which importance_recall needs",
            metavar="N",
            least=0,
            multiple=4,
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens.min_tokens < 2:
            raise CorpusRunError(
                f"`min_tokens={self.tokens.min_tokens}` (limit 2, the last one is predicted). Raise `min_tokens`"
            )


@dataclass(frozen=True)
class LabelledImportanceConfig:
    """Settings of an importance run on labelled examples. ``max_tokens`` limits text and target text; None uses the
    model's context, at most 2,048 tokens.
    """

    model: ModelSpec
    data: ExamplesSpec
    max_tokens: Annotated[int | None, Limits(least=1)] = None
    reduction: _Reduced = "mean"
    shard_size: _ShardSize = field(default=None, kw_only=True)
    batch_tokens: Count = field(default=BATCH_TOKENS, kw_only=True)

    def __post_init__(self) -> None:
        check_limits(self, CorpusRunError)


class ProbeError(HeadscanError):
    """Settings of a probe that are out of range."""


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of a probe.

    Attributes:
        behaviours: Names from the catalogue. Empty uses all of them, or those that need no tokenizer if there is none.
        corpus: The text in which needles are hidden.
    """

    model: ModelSpec
    behaviours: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated behaviours: {', '.join(BEHAVIOURS)} (default: all)", kind="behaviour", names=BEHAVIOURS
        ),
    ] = ()
    corpus: CorpusSpec = field(default_factory=lambda: CorpusSpec("python-stdlib"))
    probe: BehaviourProbe = field(default_factory=BehaviourProbe)
    batch_tokens: Count = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_limits(self, ProbeError)


@dataclass(frozen=True)
class GatesConfig:
    """Settings of a gates run; ``fit.share``, the share of heads whose gates close, must not be None."""

    model: ModelSpec
    corpus: CorpusSpec
    fit: Annotated[GateFitConfig, Group("fit")] = field(default_factory=GateFitConfig)
    two_sided: Annotated[
        bool, Option("second fit that opens gates with the same penalty, and the class of every head")
    ] = False
    site: Site = "self"
    sequences: Annotated[int, Option("number of texts", least=1)] = 256
    max_tokens: Annotated[int, Option("longest text in tokens", least=SHORTEST)] = 128

    def __post_init__(self) -> None:
        check_limits(self, GateError)
        if self.fit.share is None:
            raise GateError("`share=None` (limit above 0, below 1). Set the share of heads to close")
