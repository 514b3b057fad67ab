"""From documents to token sequences: special tokens, truncation, chunks and packs."""

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
        index: Place among the corpus's sequences, from 0.
        document: Index of its document; of the one it begins in, where documents are packed.
        source: That document's source.
        ids: Token ids, int32 (tokens,).
        truncated: The document goes on and its rest is in no sequence.
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
    """Special tokens in front of and behind the text of every sequence."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def around(self, body: Ids) -> Ids:
        ends = (np.array(tokens, dtype=np.int32) for tokens in self)
        return np.concatenate([next(ends), body, next(ends)])

    @property
    def total(self) -> int:
        return len(self.prefix) + len(self.suffix)


class _Piece(NamedTuple):
    """The text tokens of a sequence to be.

    Attributes:
        document: Its document.
        body: Its tokens, without special tokens.
        lost: The document's tokens behind it that are in no sequence, as far as they were tokenised.
        unread: The document goes on behind those.
    """

    document: Document
    body: Ids
    lost: int = 0
    unread: bool = False


def sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, plan: TokenPlan, report: CorpusReport | None = None
) -> Iterator[Sequence]:
    """Tokenise ``corpus`` by ``plan``, filling ``report`` on the way.

    The same corpus, tokenizer and plan give the same sequences. A limit does not change those before it.

    Raises:
        CorpusError: at once when the tokenizer cannot follow the plan; at the end when no sequence came out.
    """
    special = special_tokens(tokenizer, plan)
    if plan.max_tokens <= special.total:
        raise CorpusError(
            f"max_tokens is {plan.max_tokens}, and the tokenizer adds {special.total} special tokens to every text:"
            " raise max_tokens"
        )
    return _sequences(corpus, tokenizer, plan, special, CorpusReport() if report is None else report)


def special_tokens(tokenizer: PreTrainedTokenizerBase, plan: TokenPlan) -> Special:
    """The special tokens that the BOS policy puts around a text.

    Raises:
        CorpusError: ``always`` without a BOS token, or ``auto`` and the special tokens are not around the text.
    """
    if plan.bos == "never":
        return Special((), ())
    if plan.bos == "always":
        if tokenizer.bos_token_id is None:
            raise CorpusError("the tokenizer has no BOS token, so bos=always cannot be had: use bos=auto or bos=never")
        return Special((tokenizer.bos_token_id,), ())
    # Asked of the tokenizer itself, since its post-processor decides and no attribute of it tells reliably.
    probe = "a b"
    bare = list(tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"])
    full = list(tokenizer(probe, add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return Special(tuple(full[:start]), tuple(full[start + len(bare) :]))
    raise CorpusError("the tokenizer puts special tokens into the text, not around it: use bos=always or bos=never")


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
    """Documents that have text, with their tokens; counts each document when its turn comes."""
    for document, tokens in tokenised:
        report.add_document(document)
        if tokens is not None:
            yield document, tokens


def _truncate(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int) -> Iterator[_Piece]:
    for document, tokens in tokenised:
        # One token more than there is room for shows that the document goes on; the rest need not be tokenised.
        ids = _take(tokens, room + 1)
        yield _Piece(document, ids[:room], max(0, len(ids) - room), unread=next(tokens, None) is not None)


def _take(tokens: Iterator[Ids], count: int) -> Ids:
    """Whole arrays of ``tokens`` until they have ``count`` tokens or end, joined."""
    taken = [np.empty(0, dtype=np.int32)]
    while sum(map(len, taken)) < count and (ids := next(tokens, None)) is not None:
        taken.append(ids)
    return np.concatenate(taken)


def _cut(tokens: Iterator[Ids], room: int) -> Iterator[Ids]:
    """Cut the joined arrays of ``tokens`` into pieces of ``room``; the last is shorter, or empty."""
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
    """Full pieces of the joined documents, and last what is left over."""
    rest = np.empty(0, dtype=np.int32)
    begins_in: Document | None = None
    for document, tokens in tokenised:
        ends = () if begins_in is None or eos is None else (np.array([eos], dtype=np.int32),)
        # What is left of earlier documents is shorter than a piece, so only the first piece can begin in them.
        owner = begins_in if begins_in is not None and len(rest) else document
        for body in _cut(chain((rest,), ends, tokens), room):
            rest, begins_in = body, owner
            if len(body) == room:
                yield _Piece(owner, body)
                owner, rest = document, body[:0]
    if begins_in is not None and len(rest):
        yield _Piece(begins_in, rest)


def hash_ids(ids: Ids) -> str:
    """SHA-256 in hexadecimal of token ids as little-endian int32."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def _nothing(corpus: Corpus, plan: TokenPlan, report: CorpusReport) -> CorpusError:
    reasons = "; ".join(report.problems()) or "no documents"
    mend = "give a corpus with text"
    if report.too_short:
        least = plan.max_tokens if plan.mode == "pack" else plan.min_tokens
        mend = (
            f"a {plan.mode} sequence needs {least} tokens here: lower {'max' if plan.mode == 'pack' else 'min'}_tokens"
        )
    return CorpusError(f"corpus {corpus.spec.name!r} gave no sequence: {reasons}; {mend}")
