"""Texts that choose heads and repair projections, and others that judge the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from headscan.errors import PruningError
from headscan.pipelines.corpora import CorpusSpec, TokenPlan, open_corpus, sequences
from headscan.pipelines.corpora import Sequence as Text
from headscan.pipelines.evaluate.held_out_text import HeldOutText, passages
from headscan.pipelines.runs.identity import ModelIdentity

#: Longest text by default, in tokens.
_LONGEST = 2048
#: Shortest text, in tokens: predictions after few tokens say little.
_SHORTEST = 16
#: Most sequences read from a corpus for each one that is used.
_SPREAD = 64
#: Documents that the texts come from if the corpus has as many: intervals take documents as independent.
_DOCUMENTS = 32


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
            PruningError: It exceeds the model's context.
        """
        limit = identity.max_tokens
        if self.max_tokens is None:
            return _LONGEST if limit is None else min(_LONGEST, limit)
        if limit is not None and self.max_tokens > limit:
            raise PruningError(f"max_tokens={self.max_tokens} (limit {limit}, the model's context). Lower `max_tokens`")
        return self.max_tokens


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
    chosen = _spread(calibrating, half)
    seen = {text.content_hash for text in chosen}  # copies of a text can be in several documents
    unseen = [text for text in judging if text.content_hash not in seen]
    if not unseen:
        raise PruningError(f"every held-out text of {name} is a copy of a calibration text. Choose another corpus")
    held_out = _spread(unseen, half)
    say(f"{_size(chosen)} of {config.corpus.name} choose and repair, {_size(held_out)} of {name} judge")
    calibration = _padded(config.corpus.name, chosen)._replace(wanted=half)
    return calibration, HeldOutText(name, passages(identity.tokenizer, held_out))


def _size(texts: Sequence[Text]) -> str:
    documents = len({text.document for text in texts})
    return f"{len(texts)} text{'s' * (len(texts) != 1)} from {documents} document{'s' * (documents != 1)}"


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
    """Return ``count`` texts from many documents, in the order of the corpus; fewer if it has fewer."""
    plan = TokenPlan(tokens, mode="chunk", min_tokens=_SHORTEST, limit_sequences=count * _SPREAD)
    each = max(1, count // _DOCUMENTS)
    chosen: list[Text] = []
    others: list[Text] = []
    found = sequences(open_corpus(corpus), identity.tokenizer, plan)
    for _, members in groupby(found, key=lambda text: text.document):
        of_document = list(members)
        kept = _spread(of_document, each)
        chosen += kept
        others += [text for text in of_document if all(text is not other for other in kept)]
        if len(chosen) >= count:
            break
    return sorted([*chosen[:count], *_spread(others, max(0, count - len(chosen)))], key=lambda text: text.index)


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


def _spread(texts: Sequence[Text], count: int) -> list[Text]:
    """Return ``count`` texts spread evenly over all; all of them if they are fewer."""
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def _padded(corpus: str, texts: Sequence[Text]) -> CalibrationTexts:
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    ids = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text.ids
    return CalibrationTexts(corpus, ids, lengths)
