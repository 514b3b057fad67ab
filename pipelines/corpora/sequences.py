"""From documents to token sequences: special tokens, truncation, chunks and packs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.corpora.corpus import Corpus
from pipelines.corpora.documents import Document
from pipelines.corpora.report import CorpusReport
from pipelines.corpora.spec import CorpusError, TokenPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A batch for the tokenizer ends at so many documents or characters, whichever comes first.
_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 2_000_000

Ids = NDArray[np.int32]


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
    """The text tokens of a sequence to be, and how many tokens of its document end with it unused."""

    document: Document
    body: Ids
    lost: int = 0


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
    tokenised = _tokenise(corpus.documents(), tokenizer, report)
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


def _tokenise(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, report: CorpusReport
) -> Iterator[tuple[Document, Ids]]:
    """Documents with their text's tokens, without special tokens; counts each document when its turn comes."""
    for batch in _batches(documents):
        texts = [document.text for document in batch if document.text is not None]
        # verbose=False: lengths beyond the model's are cut below, so the tokenizer's warning would be wrong here.
        encoded = iter(
            tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
            if texts
            else ()
        )
        for document in batch:
            report.add_document(document)
            if document.text is not None:
                yield document, np.asarray(next(encoded), dtype=np.int32)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text or "")
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _truncate(tokenised: Iterable[tuple[Document, Ids]], room: int) -> Iterator[_Piece]:
    for document, ids in tokenised:
        yield _Piece(document, ids[:room], max(0, len(ids) - room))


def _chunk(tokenised: Iterable[tuple[Document, Ids]], room: int) -> Iterator[_Piece]:
    for document, ids in tokenised:
        for start in range(0, max(1, len(ids)), room):
            yield _Piece(document, ids[start : start + room])


def _pack(tokenised: Iterable[tuple[Document, Ids]], room: int, eos: int | None) -> Iterator[_Piece]:
    """Full pieces of the joined documents, and last what is left over."""
    rest = np.empty(0, dtype=np.int32)
    begins_in: Document | None = None
    for document, ids in tokenised:
        if begins_in is not None and eos is not None:
            ids = np.concatenate([np.array([eos], dtype=np.int32), ids])
        joined = np.concatenate([rest, ids])
        start = 0
        for start in range(0, len(joined) - room + 1, room):
            # The rest is shorter than a piece, so only the first piece can begin before this document.
            owner = begins_in if start == 0 and len(rest) and begins_in is not None else document
            yield _Piece(owner, joined[start : start + room])
        used = len(joined) // room * room
        begins_in = begins_in if used == 0 and len(rest) and begins_in is not None else document
        rest = joined[used:]
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
