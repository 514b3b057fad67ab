"""Make token sequences from documents: special tokens, truncation, chunks and packs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from headscan.settings.corpus_settings import CorpusError, CorpusSpec, TokenConfig, TokenMode
from headscan.texts.corpus import Corpus, open_corpus
from headscan.texts.documents import Document
from headscan.texts.tokenising import Ids, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Number of names kept for each problem.
EXAMPLES = 5


@dataclass
class CorpusReport:
    """Counts of documents (with or without problems), sequences and their tokens (with special tokens), and of
    everything that was dropped.

    Attributes:
        truncated: Documents whose end was dropped.
        too_short: Dropped pieces (documents, ends of documents, rest of a pack) with too few tokens.
        dropped_tokens: Tokens in no sequence: cut off, or in pieces that were too short.
        partly_tokenised: Truncated documents whose tokens are only partly in ``dropped_tokens``.
        stopped_at_limit: True if the limit of sequences ended the reading, so that the counts cover a part.
        examples: The first names for each problem or kind of skipped file, with the reason.
    """

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty: int = 0
    undecodable: int = 0
    no_text: int = 0
    truncated: int = 0
    too_short: int = 0
    dropped_tokens: int = 0
    partly_tokenised: int = 0
    skipped_files: dict[str, int] = field(default_factory=dict)
    stopped_at_limit: bool = False
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add_document(self, document: Document) -> None:
        self.documents += 1
        if document.problem is not None:
            setattr(self, document.problem, getattr(self, document.problem) + 1)
            self.add_example(document.problem, f"{document.source} ({document.detail})")

    def add_skipped(self, skipped: Mapping[str, tuple[str, ...]]) -> None:
        """Count the files of a folder that the corpus does not read."""
        for kind, names in skipped.items():
            self.skipped_files[kind] = self.skipped_files.get(kind, 0) + len(names)
            for name in names[:EXAMPLES]:
                self.add_example(f"skipped {kind}", name)

    def add_example(self, problem: str, name: str) -> None:
        names = self.examples.setdefault(problem, [])
        if len(names) < EXAMPLES:
            names.append(name)

    def lines(self) -> list[str]:
        """Return the report as lines: the totals, then one line for each kind of dropped data."""
        part = ", stopped at the limit" if self.stopped_at_limit else ""
        lines = [f"{self.documents:,} documents, {self.sequences:,} sequences, {self.tokens:,} tokens{part}"]
        lines += self.problems()
        if self.truncated:
            lines.append(f"documents truncated: {self.truncated:,} (the modes chunk and pack keep the rest)")
        if self.dropped_tokens:
            rest = f", and the rest of {self.partly_tokenised:,} long documents" if self.partly_tokenised else ""
            lines.append(f"tokens cut off or in pieces too short: {self.dropped_tokens:,}{rest}")
        return lines

    def problems(self) -> list[str]:
        """Return a line for each problem, with its first names."""
        words = {
            "empty": "empty documents",
            "undecodable": "undecodable documents",
            "no_text": "records without text",
            "too_short": "pieces too short",
        }
        lines = [self._line(getattr(self, key), word, key) for key, word in words.items() if getattr(self, key)]
        return lines + [
            self._line(count, f"skipped, {kind}", f"skipped {kind}") for kind, count in self.skipped_files.items()
        ]

    def _line(self, count: int, words: str, key: str) -> str:
        names = self.examples.get(key, [])
        more = "; ..." if count > len(names) else ""
        return f"{words}: {count:,} ({'; '.join(names)}{more})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One tokenised text.

    Attributes:
        index: Position among the corpus's sequences, from 0.
        document: Index of its document; in a pack, of the document in which it begins.
        ids: Token ids, int32 (tokens,).
        truncated: True if the rest of the document is in no sequence.
        content_hash: First 16 hexadecimal digits of the SHA-256 of the ids as little-endian int32.
        recall_task: Recall task of a prompt; None for a text of the corpus.
        start: Tokens of its document before it, in mode chunk; else 0.
    """

    index: int
    document: int
    source: str
    ids: Ids
    truncated: bool
    content_hash: str
    recall_task: str | None = None
    start: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Special(NamedTuple):
    """Special tokens before and after the text of every sequence."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def around(self, body: Ids) -> Ids:
        return np.concatenate([np.array(self.prefix, np.int32), body, np.array(self.suffix, np.int32)])

    @property
    def total(self) -> int:
        return len(self.prefix) + len(self.suffix)


class _Piece(NamedTuple):
    """The tokens of a future sequence without special tokens. ``lost`` following tokens of its document are in no
    sequence; with ``unread``, more text follows that was not tokenised. ``start`` tokens of the document precede.
    """

    document: Document
    body: Ids
    lost: int = 0
    unread: bool = False
    start: int = 0


def sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: TokenConfig, report: CorpusReport | None = None
) -> Iterator[TokenSequence]:
    """Tokenise a corpus and fill ``report``. The same corpus, tokenizer and settings give the same sequences; a limit
    does not change those before it.
    """
    special = special_tokens(tokenizer, config)
    if config.longest <= special.total:
        raise CorpusError(
            f"`max_tokens={config.longest}` leaves no room for text: the tokenizer adds {special.total} special"
            " tokens. Raise `max_tokens`"
        )
    return _sequences(corpus, tokenizer, config, special, CorpusReport() if report is None else report)


def special_tokens(tokenizer: PreTrainedTokenizerBase, config: TokenConfig) -> Special:
    """Return the special tokens around a text under a BOS policy."""
    if config.bos == "never":
        return Special((), ())
    if config.bos == "always":
        if tokenizer.bos_token_id is None:
            raise CorpusError("`bos=always`: the tokenizer has no BOS token. Use `bos=auto` or `bos=never`")
        return Special((tokenizer.bos_token_id,), ())
    # Measured on a text, because the tokenizer's post-processor decides and no attribute shows it reliably.
    probe_text = "a b"
    plain_ids = list(tokenizer(probe_text, add_special_tokens=False, verbose=False)["input_ids"])
    all_ids = list(tokenizer(probe_text, add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(all_ids) - len(plain_ids) + 1):
        end = start + len(plain_ids)
        if all_ids[start:end] == plain_ids:
            return Special(tuple(all_ids[:start]), tuple(all_ids[end:]))
    raise CorpusError(
        "the tokenizer puts special tokens inside the text, not around it. Use `bos=always` or `bos=never`"
    )


def _sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: TokenConfig, special: Special, report: CorpusReport
) -> Iterator[TokenSequence]:
    report.add_skipped(corpus.skipped)
    room = config.longest - special.total
    tokenised = _with_text(tokenise(corpus.documents(), tokenizer), report)
    if config.mode == "truncate":
        pieces = _truncate(tokenised, room)
    elif config.mode == "chunk":
        pieces = _chunk(tokenised, room)
    else:
        pieces = _pack(tokenised, room, tokenizer.eos_token_id)
    index = 0
    for piece in pieces:
        size = len(piece.body) + special.total
        report.truncated += bool(piece.lost)
        report.dropped_tokens += piece.lost
        report.partly_tokenised += piece.unread
        if size < config.min_tokens or not len(piece.body) or (config.mode == "pack" and size < config.longest):
            report.too_short += 1
            report.dropped_tokens += len(piece.body)
            report.add_example("too_short", f"{piece.document.source} ({size} tokens)")
            continue
        ids = special.around(piece.body)
        report.sequences += 1
        report.tokens += size
        yield TokenSequence(
            index,
            piece.document.index,
            piece.document.source,
            ids,
            bool(piece.lost),
            hash_ids(ids)[:16],
            start=piece.start,
        )
        index += 1
        if index == config.limit_sequences:
            report.stopped_at_limit = True
            return
    if index == 0:
        raise _no_sequence_error(corpus, config, report)


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
    taken = [np.empty(0, dtype=np.int32)]
    while sum(map(len, taken)) < count and (ids := next(tokens, None)) is not None:
        taken.append(ids)
    return np.concatenate(taken)


def _cut(tokens: Iterator[Ids], room: int) -> Iterator[Ids]:
    """Cut the joined arrays of ``tokens`` into pieces of ``room`` tokens; the last piece is shorter, or empty."""
    rest = np.empty(0, dtype=np.int32)
    for ids in tokens:
        rest = np.concatenate([rest, ids])
        full_pieces = len(rest) // room
        for piece in range(full_pieces):
            yield rest[piece * room : (piece + 1) * room]
        rest = rest[full_pieces * room :]
    yield rest


def _chunk(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int) -> Iterator[_Piece]:
    for document, tokens in tokenised:
        for number, body in enumerate(_cut(tokens, room)):
            if len(body) or number == 0:
                yield _Piece(document, body, start=number * room)


def _pack(tokenised: Iterable[tuple[Document, Iterator[Ids]]], room: int, eos: int | None) -> Iterator[_Piece]:
    """Yield full pieces of the joined documents, and then the rest."""
    rest = np.empty(0, dtype=np.int32)
    rest_begins_in: Document | None = None
    for document, tokens in tokenised:
        separator = () if rest_begins_in is None or eos is None else (np.array([eos], dtype=np.int32),)
        # The rest of earlier documents is shorter than a piece, so only the first piece can begin in it.
        piece_begins_in = rest_begins_in if rest_begins_in is not None and len(rest) else document
        for body in _cut(chain((rest,), separator, tokens), room):
            rest, rest_begins_in = body, piece_begins_in
            if len(body) == room:
                yield _Piece(piece_begins_in, body)
                piece_begins_in, rest = document, body[:0]
    if rest_begins_in is not None and len(rest):
        yield _Piece(rest_begins_in, rest)


def hash_ids(ids: Ids) -> str:
    """Return the SHA-256 in hexadecimal of token ids as little-endian int32."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def _no_sequence_error(corpus: Corpus, config: TokenConfig, report: CorpusReport) -> CorpusError:
    reasons = "; ".join(report.problems()) or "no documents"
    fix = "give a corpus with text"
    if report.too_short:
        least_tokens, option = config.min_tokens, "min_tokens"
        if config.mode == "pack":
            least_tokens, option = config.longest, "max_tokens"
        fix = f"a {config.mode} sequence needs {least_tokens} tokens. Lower `{option}`"
    return CorpusError(f"corpus {corpus.spec.name!r} gave no sequence: {reasons}; {fix}")


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive sequences, stored together; ``content_hash`` is the SHA-256 of their lengths and token ids."""

    index: int
    sequences: tuple[TokenSequence, ...]
    content_hash: str

    @property
    def name(self) -> str:
        return f"shard {self.index}"


def shards(sequences: Iterable[TokenSequence], *, shard_size: int) -> Iterator[Shard]:
    """Cut ``sequences`` into shards of ``shard_size`` sequences (the last may have fewer), in order."""
    if shard_size < 1:
        raise CorpusError(f"`shard_size={shard_size}` is too small. Give at least 1")
    return _shards(iter(sequences), shard_size)


def _shards(stream: Iterator[TokenSequence], shard_size: int) -> Iterator[Shard]:
    index = 0
    while group := tuple(islice(stream, shard_size)):
        digest = hashlib.sha256()
        for sequence in group:
            digest.update(len(sequence).to_bytes(8, "little"))
            digest.update(sequence.ids.astype("<i4").tobytes())
        yield Shard(index, group, digest.hexdigest())
        index += 1


T = TypeVar("T")

#: Most sequences read from a corpus for each one that is used.
_READ_PER_TEXT = 64
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
) -> list[TokenSequence]:
    """Return ``count`` texts (or all) of ``shortest`` to ``tokens`` tokens, in order, from many documents."""
    config = TokenConfig(tokens, mode=mode, min_tokens=shortest, limit_sequences=count * _READ_PER_TEXT)
    count_per_document = max(1, count // _DOCUMENTS)
    used_texts: list[TokenSequence] = []
    other_texts: list[TokenSequence] = []
    for _, members in groupby(sequences(open_corpus(corpus), tokenizer, config), key=lambda text: text.document):
        document_texts = list(members)
        spread_texts = spread(document_texts, count_per_document)
        used_texts += spread_texts
        other_texts += [text for text in document_texts if all(text is not used for used in spread_texts)]
        if len(used_texts) >= count:
            break
    missing_texts = spread(other_texts, max(0, count - len(used_texts)))
    return sorted([*used_texts[:count], *missing_texts], key=lambda text: text.index)


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` items spread evenly over all; all of them if they are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
