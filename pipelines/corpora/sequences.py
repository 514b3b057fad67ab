"""Make token sequences from documents: special tokens, truncation, chunks and packs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headscan.pipelines.corpora.corpus import Corpus
from headscan.pipelines.corpora.corpus_counts import CorpusReport
from headscan.pipelines.corpora.corpus_spec import CorpusError, TokenPlan
from headscan.pipelines.corpora.documents import Document
from headscan.pipelines.corpora.tokenising import Ids, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Sequence:
    """One tokenised text.

    Attributes:
        index: Position among the corpus's sequences, from 0.
        document: Index of its document; in a pack, of the document in which it begins.
        source: That document's source.
        ids: Token ids, int32 (tokens,).
        truncated: True if the rest of the document is in no sequence.
        content_hash: First 16 hexadecimal digits of the SHA-256 of the ids as little-endian int32.
    """

    index: int
    document: int
    source: str
    ids: Ids
    truncated: bool
    content_hash: str

    def __len__(self) -> int:
        return len(self.ids)


class Special(NamedTuple):
    """Special tokens before and after the text of every sequence."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def around(self, body: Ids) -> Ids:
        ends = (np.array(tokens, dtype=np.int32) for tokens in self)
        return np.concatenate([next(ends), body, next(ends)])

    @property
    def total(self) -> int:
        return len(self.prefix) + len(self.suffix)


class _Piece(NamedTuple):
    """The text tokens of a future sequence.

    Attributes:
        document: Its document.
        body: Its tokens, without special tokens.
        lost: Number of following tokens that were tokenised and are in no sequence.
        unread: True if more text follows that was not tokenised.
    """

    document: Document
    body: Ids
    lost: int = 0
    unread: bool = False


def sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, plan: TokenPlan, report: CorpusReport | None = None
) -> Iterator[Sequence]:
    """Tokenise a corpus and fill ``report``.

    The same corpus, tokenizer and plan give the same sequences. A limit does not change the sequences before it.

    Raises:
        CorpusError: The tokenizer cannot follow the plan (raised at once), or there is no sequence (at the end).
    """
    special = special_tokens(tokenizer, plan)
    if plan.max_tokens <= special.total:
        raise CorpusError(
            f"max_tokens={plan.max_tokens} leaves no room for text: the tokenizer adds {special.total} special tokens."
            " Raise `max_tokens`"
        )
    return _sequences(corpus, tokenizer, plan, special, CorpusReport() if report is None else report)


def special_tokens(tokenizer: PreTrainedTokenizerBase, plan: TokenPlan) -> Special:
    """Return the special tokens around a text under a BOS policy.

    Raises:
        CorpusError: ``always`` without a BOS token, or ``auto`` with special tokens inside the text.
    """
    if plan.bos == "never":
        return Special((), ())
    if plan.bos == "always":
        if tokenizer.bos_token_id is None:
            raise CorpusError("bos=always: the tokenizer has no BOS token. Use bos=auto or bos=never")
        return Special((tokenizer.bos_token_id,), ())
    # Measured on a text, because the tokenizer's post-processor decides and no attribute shows it reliably.
    probe = "a b"
    bare = list(tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"])
    full = list(tokenizer(probe, add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return Special(tuple(full[:start]), tuple(full[start + len(bare) :]))
    raise CorpusError("the tokenizer puts special tokens inside the text, not around it. Use bos=always or bos=never")


def _sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, plan: TokenPlan, special: Special, report: CorpusReport
) -> Iterator[Sequence]:
    report.add_skipped(corpus.skipped)
    room = plan.max_tokens - special.total
    tokenised = _with_text(tokenise(corpus.documents(), tokenizer), report)
    if plan.mode == "truncate":
        pieces = _truncate(tokenised, room)
    elif plan.mode == "chunk":
        pieces = _chunk(tokenised, room)
    else:
        pieces = _pack(tokenised, room, tokenizer.eos_token_id)
    index = 0
    for piece in pieces:
        size = len(piece.body) + special.total
        report.truncated += bool(piece.lost)
        report.dropped_tokens += piece.lost
        report.partly_tokenised += piece.unread
        if size < plan.min_tokens or not len(piece.body) or (plan.mode == "pack" and size < plan.max_tokens):
            report.too_short += 1
            report.dropped_tokens += len(piece.body)
            report.add_example("too_short", f"{piece.document.source} ({size} tokens)")
            continue
        ids = special.around(piece.body)
        report.sequences += 1
        report.tokens += size
        yield Sequence(index, piece.document.index, piece.document.source, ids, bool(piece.lost), hash_ids(ids)[:16])
        index += 1
        if index == plan.limit_sequences:
            report.stopped_at_limit = True
            return
    if index == 0:
        raise _nothing(corpus, plan, report)


def _with_text(
    tokenised: Iterable[tuple[Document, Iterator[Ids] | None]], report: CorpusReport
) -> Iterator[tuple[Document, Iterator[Ids]]]:
    """Yield documents with text and their tokens; count all."""
    for document, tokens in tokenised:
        report.add_document(document)
        if tokens is not None:
            yield document, tokens


def _truncate(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int) -> Iterator[_Piece]:
    for document, tokens in tokenised:
        # One token more than fits shows that text follows, so the rest need not be tokenised.
        ids = _take(tokens, room + 1)
        yield _Piece(document, ids[:room], max(0, len(ids) - room), unread=next(tokens, None) is not None)


def _take(tokens: Iterator[Ids], count: int) -> Ids:
    """Join arrays of ``tokens`` up to ``count`` tokens, or all."""
    taken = [np.empty(0, dtype=np.int32)]
    while sum(map(len, taken)) < count and (ids := next(tokens, None)) is not None:
        taken.append(ids)
    return np.concatenate(taken)


def _cut(tokens: Iterator[Ids], room: int) -> Iterator[Ids]:
    """Cut the joined arrays of ``tokens`` into pieces of ``room``.

    The last piece is shorter, or empty.
    """
    rest = np.empty(0, dtype=np.int32)
    for ids in tokens:
        rest = np.concatenate([rest, ids])
        full = len(rest) // room * room
        yield from np.split(rest[:full], full // room) if full else ()
        rest = rest[full:]
    yield rest


def _chunk(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int) -> Iterator[_Piece]:
    for document, tokens in tokenised:
        for number, body in enumerate(_cut(tokens, room)):
            if len(body) or number == 0:
                yield _Piece(document, body)


def _pack(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int, eos: int | None) -> Iterator[_Piece]:
    """Yield full pieces of the joined documents, and then the rest."""
    rest = np.empty(0, dtype=np.int32)
    begins_in: Document | None = None
    for document, tokens in tokenised:
        ends = () if begins_in is None or eos is None else (np.array([eos], dtype=np.int32),)
        # The rest of earlier documents is shorter than a piece, so only the first piece can begin in it.
        owner = begins_in if begins_in is not None and len(rest) else document
        for body in _cut(chain((rest,), ends, tokens), room):
            rest, begins_in = body, owner
            if len(body) == room:
                yield _Piece(owner, body)
                owner, rest = document, body[:0]
    if begins_in is not None and len(rest):
        yield _Piece(begins_in, rest)


def hash_ids(ids: Ids) -> str:
    """Return the SHA-256 in hexadecimal of token ids as little-endian int32."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def _nothing(corpus: Corpus, plan: TokenPlan, report: CorpusReport) -> CorpusError:
    reasons = "; ".join(report.problems()) or "no documents"
    fix = "give a corpus with text"
    if report.too_short:
        least = plan.max_tokens if plan.mode == "pack" else plan.min_tokens
        fix = f"a {plan.mode} sequence needs {least} tokens. Lower `{'max' if plan.mode == 'pack' else 'min'}_tokens`"
    return CorpusError(f"corpus {corpus.spec.name!r} gave no sequence: {reasons}; {fix}")
