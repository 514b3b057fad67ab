"""What a user says about a corpus and its tokens: `CorpusSpec`, `TokenPlan`, and the error for getting it wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headscan.errors import HeadscanError

TokenMode = Literal["truncate", "chunk", "pack"]
BosPolicy = Literal["auto", "always", "never"]


class CorpusError(HeadscanError):
    """A corpus is missing, holds no text, or cannot be read or tokenised as asked."""


@dataclass(frozen=True)
class CorpusSpec:
    """Which texts to read.

    Attributes:
        name: A built-in corpus, a file or folder, or a data set on the hub, tried in this order.
        config: Configuration of a hub data set.
        split: Split of a hub data set.
        column: The column that holds the text. None: ``text`` if there is one, else the only column of strings.
        revision: Branch, tag or commit of a hub data set.
        limit_documents: Stop after this many documents that have text. None: read all.

    Raises:
        CorpusError: a field is empty or out of range.
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
                raise CorpusError(f"corpus {field} is {value!r}: give a name that is not empty")
        _at_least("limit_documents", self.limit_documents, 1)


@dataclass(frozen=True)
class TokenPlan:
    """How documents become sequences of tokens.

    Attributes:
        max_tokens: Longest sequence, in tokens, special tokens included.
        mode: ``truncate``: the beginning of every document, one sequence each. ``chunk``: every document cut into
            consecutive sequences. ``pack``: documents joined, EOS between them where the tokenizer has one, and cut
            into full sequences, as models are trained; queries then attend to earlier documents of their sequence.
        bos: ``auto``: the special tokens that the tokenizer itself puts around a text. ``always``: BOS in front of
            every sequence, and no other special token. ``never``: the text's own tokens alone.
        min_tokens: Shortest sequence, in tokens, special tokens included; shorter ones are counted and left out.
        limit_sequences: Stop after this many sequences. None: no limit.

    Raises:
        CorpusError: a field is out of range.
    """

    max_tokens: int
    mode: TokenMode = "truncate"
    bos: BosPolicy = "auto"
    min_tokens: int = 2
    limit_sequences: int | None = None

    def __post_init__(self) -> None:
        for field, choices in (("mode", get_args(TokenMode)), ("bos", get_args(BosPolicy))):
            if getattr(self, field) not in choices:
                raise CorpusError(f"{field} is {getattr(self, field)!r}: choose one of {', '.join(choices)}")
        _at_least("min_tokens", self.min_tokens, 1)
        _at_least("limit_sequences", self.limit_sequences, 1)
        if self.max_tokens < self.min_tokens:
            raise CorpusError(f"max_tokens is {self.max_tokens}: give min_tokens ({self.min_tokens}) or more")

    @property
    def attention_across_documents(self) -> bool:
        """True if queries attend to the tokens of other documents."""
        return self.mode == "pack"


def _at_least(field: str, value: int | None, limit: int) -> None:
    if value is not None and value < limit:
        raise CorpusError(f"{field} is {value}: give {limit} or more")
