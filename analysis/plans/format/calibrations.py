"""Origins of a plan's scores: a scan, a probe, a damage measurement, a pattern file or a seed.

Each has a ``kind``, by which the plan file's reader chooses the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headscan.analysis.plans.format.plan_records import PlanError

#: Tools whose patterns can be read.
PatternFormat = Literal["duoattention", "rlkv", "prulong", "headkv"]


@dataclass(frozen=True)
class LengthBin:
    """Number of sequences with at least ``at_least`` and fewer than ``below`` tokens."""

    at_least: int
    below: int
    sequences: int


@dataclass(frozen=True)
class ScanCalibration:
    """Corpus, model settings and lengths of a scan.

    Attributes:
        run_id: The scan in its store.
        sequences: All sequences of the scan, and ``tokens`` their real tokens.
        sink: First keys that the scan counted as sink, and ``recent`` the last ones that it counted as recent.
        evidence_sequences: Sequences longer than ``sink + recent``. Shorter ones have no distant keys and are left out.
        evidence_queries: Queries of those sequences that have distant keys.
        code_version: Version of headscan that made the scan.
    """

    run_id: str
    corpus: str | None
    corpus_hash: str | None
    tokenizer_hash: str | None
    bos_policy: str | None
    dtype: str
    attention_path: str | None
    sequences: int
    tokens: int
    length_histogram: tuple[LengthBin, ...]
    sink: int
    recent: int
    evidence_sequences: int
    evidence_queries: int
    code_version: str | None
    kind: Literal["scan"] = "scan"


@dataclass(frozen=True)
class ProbeCalibration:
    """Behaviours, text and model settings of a probe.

    Attributes:
        run_id: The probe in its store.
        behaviours: Behaviours that decide the scores, the first before the others.
        corpus: Text of the haystacks; None if no behaviour needs one.
    """

    run_id: str
    behaviours: tuple[str, ...]
    corpus: str | None
    corpus_hash: str | None
    tokenizer_hash: str | None
    dtype: str
    attention_path: str | None
    code_version: str | None
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True)
class DamageTexts:
    """Sequences on which damage was measured.

    Attributes:
        task: Text (ordinary documents), or a recall task.
        name: Name of the corpus or of the prompts.
        content_hash: Hash of the token ids.
        tokens: Tokens of all ``sequences``.
        gate_points: Values of the gate (1 = full cache, 0 = window) at which the derivative was taken; empty if heads
            were windowed one by one.
    """

    task: Literal["text", "needle", "copying"]
    name: str
    content_hash: str
    sequences: int
    tokens: int
    gate_points: tuple[float, ...]


@dataclass(frozen=True)
class DamageCalibration:
    """Texts, window and model settings of a damage measurement.

    Attributes:
        texts: What was measured on; at least one entry.
        sink: First tokens of the measured windows, and ``recent`` the last ones of the narrowest one; `HeadDamage` has
            each head's.
        seed: Seed of the prompts.

    Raises:
        PlanError: No texts.
    """

    texts: tuple[DamageTexts, ...]
    sink: int
    recent: int
    dtype: str
    attention_path: str | None
    code_version: str | None
    seed: int | None
    kind: Literal["damage"] = "damage"

    def __post_init__(self) -> None:
        if not self.texts:
            raise PlanError("the damage measurement names no texts. Give at least one entry of `texts`")


@dataclass(frozen=True)
class PatternCalibration:
    """File of an imported pattern.

    Attributes:
        sha256: Hash of the file.
        sink_size: First tokens of a window head by the file; None if it does not state them, as for ``recent_size`` and
            ``sparsity`` (share of window heads).
        inverted: Low numbers keep the full cache in the file.
        run_id: Run from which the model's shape was read.
    """

    format: PatternFormat
    path: str
    sha256: str
    sink_size: int | None
    recent_size: int | None
    sparsity: float | None
    inverted: bool
    run_id: str | None
    kind: Literal["pattern"] = "pattern"


@dataclass(frozen=True)
class RandomCalibration:
    """Seed of random scores, and the run from which the model's shape was read."""

    seed: int
    run_id: str | None
    kind: Literal["random"] = "random"


Calibration = ScanCalibration | ProbeCalibration | DamageCalibration | PatternCalibration | RandomCalibration
