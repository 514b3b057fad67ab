"""Texts that choose heads and repair projections, and others that judge the result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from headscan.errors import PruningError
from headscan.pipelines.corpora import CorpusSpec
from headscan.pipelines.corpora import Sequence as Text
from headscan.pipelines.corpora.sequences import read_spread, spread
from headscan.pipelines.evaluate.held_out_text import HeldOutText, chunks
from headscan.pipelines.kv.damage_measurement import ABLE, ALL_KEYS, Prompts, masked_losses, recall_prompts
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.runs.run_options import longest_text
from headscan.pipelines.runs.run_records import RunContext

#: Shortest text, in tokens: predictions after few tokens say little.
_SHORTEST = 16


@dataclass(frozen=True)
class TextConfig:
    """Texts of a pruning.

    Attributes:
        corpus: Ordinary text.
        held_out: Text that judges the result; None splits the documents of ``corpus`` into halves with about as many
            texts. A corpus of one document is split in the middle.
        sequences: Number of texts; one half chooses and repairs, the other judges.
        max_tokens: Longest text; None uses the model's context, at most 2,048 tokens.

    Raises:
        PruningError: A number is out of range.
    """

    corpus: CorpusSpec = field(default_factory=lambda: CorpusSpec("python-stdlib"))
    held_out: CorpusSpec | None = None
    sequences: int = 256
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sequences < 2:
            raise PruningError(f"sequences={self.sequences} (limit 2, one to repair and one held out). Raise it")
        if self.max_tokens is not None and self.max_tokens < _SHORTEST:
            raise PruningError(f"max_tokens={self.max_tokens} (limit {_SHORTEST}). Raise `max_tokens`")

    def tokens(self, identity: ModelIdentity) -> int:
        """Return the length of the longest text.

        Raises:
            SequenceError: It exceeds the model's context.
        """
        return longest_text(identity, self.max_tokens)


class CalibrationTexts(NamedTuple):
    """Token ids of texts, padded on the right.

    Attributes:
        corpus: Name of the corpus.
        ids: (B, N) int64.
        lengths: (B,) int64.
        wanted: Number of texts that the corpus should have given.
    """

    corpus: str
    ids: np.ndarray
    lengths: np.ndarray
    wanted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of a hash of the ids."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes() + self.lengths.tobytes()).hexdigest()[:16]


def read_texts(
    config: TextConfig, identity: ModelIdentity, say: Callable[[str], None] = lambda line: None
) -> tuple[CalibrationTexts, HeldOutText]:
    """Return the texts that choose and repair, and those that judge.

    They share no document, except if the corpus has one only, which is split in the middle.

    Args:
        say: Called with the number of texts and documents of each half.

    Raises:
        PruningError: The corpus has one text only, or nothing but copies.
        CorpusError: A corpus cannot be read.
    """
    tokens, half = config.tokens(identity), config.sequences // 2
    if config.held_out is None:
        # More than needed, because the halves of the documents can differ in texts.
        calibrating, judging = _halves(_read(config.corpus, identity, tokens, 4 * half), config.corpus.name)
    else:
        calibrating = _read(config.corpus, identity, tokens, half)
        judging = _read(config.held_out, identity, tokens, half)
    name = (config.held_out or config.corpus).name
    chosen = spread(calibrating, half)
    seen = {text.content_hash for text in chosen}  # copies of a text can be in several documents
    unseen = [text for text in judging if text.content_hash not in seen]
    if not unseen:
        raise PruningError(f"every held-out text of {name} is a copy of a calibration text. Choose another corpus")
    held_out = spread(unseen, half)
    say(f"{_size(chosen)} of {config.corpus.name} choose and repair, {_size(held_out)} of {name} judge")
    calibration = _padded(config.corpus.name, chosen)._replace(wanted=half)
    return calibration, HeldOutText(name, chunks(identity.tokenizer, held_out))


def _size(texts: Sequence[Text]) -> str:
    documents = len({text.document for text in texts})
    return f"{len(texts)} text{'s' * (len(texts) != 1)} from {documents} document{'s' * (documents != 1)}"


@dataclass(frozen=True)
class RecallConfig:
    """Recall prompts of a pruning, in addition to its texts: text alone does not show which heads copy and retrieve.

    Attributes:
        prompts: Number of prompts of each recall task, a multiple of 8; one half chooses and repairs, the other judges.
            0 uses texts only.
        tokens: Longest prompt; shorter if the model's context is.
        weight: Weight of a recall task's mean prediction, next to that of a text's; the tasks share it.
        seed: Seed of the prompts.

    Raises:
        PruningError: A number is out of range.
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


def read_recall(
    config: RecallConfig, context: RunContext, batch_tokens: int, say: Callable[[str], None] = lambda line: None
) -> tuple[tuple[Prompts, ...], tuple[Prompts, ...]]:
    """Return the recall prompts that choose and repair, and those that judge.

    Tasks that the original cannot do are left out, which ``say`` reports.

    Raises:
        RecallError: The tokenizer or the model's context does not allow recall prompts.
    """
    if not config.prompts:
        return (), ()
    identity = context.identity
    tokens = min(config.tokens, identity.max_tokens or config.tokens)
    able = []
    for prompts in recall_prompts(identity, tokens, config.prompts, config.seed):
        losses = masked_losses(
            context.pool, prompts.requests, [ALL_KEYS], batch_tokens=batch_tokens, rope=identity.rope_lengths
        )
        right = float(losses.greedy.mean())
        if right >= ABLE:
            able.append(prompts.halves())
        else:
            say(
                f"{prompts.name} is left out of the calibration: the model gets {right:.0%} of the answer tokens right"
                f" (at least {ABLE:.0%})"
            )
    return tuple(first for first, _ in able), tuple(second for _, second in able)


def check_tokens(texts: CalibrationTexts, columns: int) -> None:
    """Raise PruningError if a projection has more columns than the texts have tokens.

    Args:
        columns: Columns of the widest projection that is repaired.

    Raises:
        PruningError: With the number of texts that are needed, if the corpus has more.
    """
    if texts.tokens < columns:
        needed = 2 * -(-columns * len(texts.lengths) // texts.tokens)
        is_exhausted = len(texts.lengths) < texts.wanted
        fix = "Choose a larger corpus" if is_exhausted else f"Set `sequences` to {needed} or more"
        raise PruningError(
            f"{texts.tokens} calibration tokens of {texts.corpus} (limit {columns}, the columns of the widest repaired"
            f" projection). {fix}"
        )


def _read(corpus: CorpusSpec, identity: ModelIdentity, tokens: int, count: int) -> list[Text]:
    return read_spread(corpus, identity.tokenizer, tokens, count, shortest=_SHORTEST)


def _halves(texts: Sequence[Text], corpus: str) -> tuple[list[Text], list[Text]]:
    """Split texts by document into halves of about as many texts; if there is one document, in the middle."""
    halves: tuple[list[Text], list[Text]] = ([], [])
    for _, of_document in groupby(texts, key=lambda text: text.document):
        min(halves, key=len).extend(of_document)
    if halves[1]:
        return halves
    if len(texts) < 2:
        raise PruningError(
            f"{corpus} has {len(texts)} text of {_SHORTEST} tokens or more (limit 2, one to repair and one held out)."
            " Choose another corpus, or lower `max_tokens`"
        )
    return list(texts[: len(texts) // 2]), list(texts[len(texts) // 2 :])


def _padded(corpus: str, texts: Sequence[Text]) -> CalibrationTexts:
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    ids = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text.ids
    return CalibrationTexts(corpus, ids, lengths)
