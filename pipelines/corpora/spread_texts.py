"""Texts from many documents of a corpus, fewer than it has."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from headscan.pipelines.corpora.corpus import open_corpus
from headscan.pipelines.corpora.corpus_spec import CorpusSpec, TokenMode, TokenPlan
from headscan.pipelines.corpora.sequences import Sequence, sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

#: Most sequences read from a corpus for each one that is used.
_SPREAD = 64
#: Documents that the texts come from if the corpus has as many: intervals take documents as independent.
_DOCUMENTS = 32


def read_spread(
    corpus: CorpusSpec,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    count: int,
    *,
    shortest: int,
    mode: TokenMode = "chunk",
) -> list[Sequence]:
    """Return ``count`` texts from many documents, in the order of the corpus; fewer if it has fewer.

    Args:
        tokens: Length of the longest text.
        shortest: Length of the shortest text.
        mode: How documents become texts.

    Raises:
        CorpusError: The corpus cannot be read.
    """
    plan = TokenPlan(tokens, mode=mode, min_tokens=shortest, limit_sequences=count * _SPREAD)
    each = max(1, count // _DOCUMENTS)
    chosen: list[Sequence] = []
    others: list[Sequence] = []
    for _, members in groupby(sequences(open_corpus(corpus), tokenizer, plan), key=lambda text: text.document):
        of_document = list(members)
        kept = spread(of_document, each)
        chosen += kept
        others += [text for text in of_document if all(text is not other for other in kept)]
        if len(chosen) >= count:
            break
    return sorted([*chosen[:count], *spread(others, max(0, count - len(chosen)))], key=lambda text: text.index)


def spread(items: SequenceOf[T], count: int) -> list[T]:
    """Return ``count`` items spread evenly over all; all of them if they are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
