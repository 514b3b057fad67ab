"""Settings of a corpus and of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headscan.errors import HeadscanError

TokenMode = Literal["truncate", "chunk", "pack"]
BosPolicy = Literal["auto", "always", "never"]


class CorpusError(HeadscanError):
    """A corpus cannot be found, read or tokenised."""


@dataclass(frozen=True)
class CorpusSpec:
    """Settings of a corpus.

    Attributes:
        name: Built-in corpus, file or folder, or hub data set, tried in this order.
        config: Configuration of a hub data set.
        split: Split of a hub data set.
        column: Text column. None uses ``text`` if it exists, or else the only string column.
        revision: Branch, tag or commit of a hub data set.
        limit_documents: Most documents with text. None reads all.

    Raises:
        CorpusError: A field is empty or out of range.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None
    revision: str | None = None
    limit_documents: int | None = None

    def __post_init__(self) -> None:
        for field in ("name", "config", "split", "column", "revision"):
            value = getattr(self, field)
            if value is not None and not value.strip():
                raise CorpusError(f"corpus {field} is {value!r}. Give a non-empty name")
        _at_least("limit_documents", self.limit_documents, 1)


@dataclass(frozen=True)
class TokenPlan:
    """Settings for making token sequences from documents.

    Attributes:
        max_tokens: Longest sequence, in tokens, special tokens included.
        mode: ``truncate`` makes one sequence from the beginning of each document. ``chunk`` cuts each document into
            consecutive sequences. ``pack`` joins documents (with EOS between them if the tokenizer has it) and cuts
            them into full sequences, as in training; queries then attend to earlier documents of their sequence.
        bos: ``auto`` adds the special tokens that the tokenizer puts around a text. ``always`` adds BOS before every
            sequence and no other special token. ``never`` adds none.
        min_tokens: Shortest sequence, in tokens, special tokens included; shorter ones are counted and dropped.
        limit_sequences: Most sequences. None disables the limit.

    Raises:
        CorpusError: A field is out of range.
    """

    max_tokens: int
    mode: TokenMode = "truncate"
    bos: BosPolicy = "auto"
    min_tokens: int = 2
    limit_sequences: int | None = None

    def __post_init__(self) -> None:
        for field, choices in (("mode", get_args(TokenMode)), ("bos", get_args(BosPolicy))):
            if getattr(self, field) not in choices:
                raise CorpusError(f"{field} is {getattr(self, field)!r}. Choose one of {', '.join(choices)}")
        _at_least("min_tokens", self.min_tokens, 1)
        _at_least("limit_sequences", self.limit_sequences, 1)
        if self.max_tokens < self.min_tokens:
            raise CorpusError(f"max_tokens={self.max_tokens} is below min_tokens={self.min_tokens}. Raise `max_tokens`")

    @property
    def attention_across_documents(self) -> bool:
        """True if queries attend to the tokens of other documents."""
        return self.mode == "pack"


def _at_least(field: str, value: int | None, limit: int) -> None:
    if value is not None and value < limit:
        raise CorpusError(f"{field}={value} is too small. Give at least {limit}")
