"""Make token sequences from documents: special tokens, truncation, chunks and packs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from headscan.settings.corpus_settings import CorpusError, CorpusSpec, TokenConfig, TokenMode
from headscan.text_tables import counted
from headscan.texts.corpus import Corpus, open_corpus
from headscan.texts.documents import Document
from headscan.texts.drawing import BLOCK, Draw, DrawnBlock
from headscan.texts.tokenising import Ids, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Number of names kept for each problem.
EXAMPLES = 5

#: Tokens of a block of a document that is read whole, about as many as `BLOCK` characters have.
_BLOCK_TOKENS = 5_000
#: Fewest characters of a block for each token of a drawn sequence: few texts have more than 8 characters per token, so
#: a block has several sequences.
_BLOCK_CHARACTERS = 16
#: Characters of a block for each token of a pack, so that packs come from about as many blocks.
_PACK_CHARACTERS = 4
#: Blocks that are tokenised together.
_TOGETHER = 64


@dataclass(frozen=True)
class Drawn:
    """The documents and files of drawn sequences, and the number of files with text."""

    documents: int
    files: int
    of_files: int


@dataclass
class CorpusReport:
    """Counts of documents (with or without problems), sequences and their tokens (with special tokens), and of
    everything that was dropped.

    Attributes:
        truncated: Documents whose end was dropped.
        too_short: Dropped pieces (documents, ends of documents, rest of a pack) with too few tokens.
        dropped_tokens: Tokens in no sequence: cut off, or in pieces that were too short.
        partly_tokenised: Truncated documents whose tokens are only partly in ``dropped_tokens``.
        drawn: Where the sequences come from, if a limit drew them; the drops are then those of the blocks that were
            tokenised. None if all sequences were read.
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
    drawn: Drawn | None = None
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
        lines = [self.total()]
        lines += self.problems()
        if self.truncated:
            lines.append(f"documents truncated: {self.truncated:,} (the modes chunk and pack keep the rest)")
        if self.dropped_tokens:
            rest = (
                f", and the rest of {counted(self.partly_tokenised, 'long document')}" if self.partly_tokenised else ""
            )
            lines.append(f"tokens cut off or in pieces too short: {self.dropped_tokens:,}{rest}")
        return lines

    def total(self) -> str:
        """Return what was read in one line, and where drawn sequences come from."""
        read = f"{counted(self.sequences, 'sequence')}, {counted(self.tokens, 'token')}"
        if self.drawn is None:
            return f"{counted(self.documents, 'document')}, {read}"
        files = f" in {self.drawn.files:,} of {self.drawn.of_files:,} files" if self.drawn.of_files > 1 else ""
        documents = f"{self.drawn.documents:,} of {counted(self.documents, 'document')}{files}"
        return f"{read}, drawn from {documents} by a hash of the text"

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
        block: Number of its block in the document, in mode chunk; else 0. Texts of one block are about as dependent as
            those of one document.
    """

    index: int
    document: int
    source: str
    ids: Ids
    truncated: bool
    content_hash: str
    recall_task: str | None = None
    block: int = 0

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
    sequence; with ``unread``, more text follows that was not tokenised.
    """

    document: Document
    body: Ids
    lost: int = 0
    unread: bool = False
    block: int = 0


def sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: TokenConfig, report: CorpusReport | None = None
) -> Iterator[TokenSequence]:
    """Tokenise a corpus and fill ``report``. The same corpus, tokenizer and settings give the same sequences.

    ``config.limit_sequences`` draws so many from all files by a hash of their text (`drawing`), in the order of the
    corpus. A larger limit gives the same sequences and others. Long documents are then tokenised in blocks.
    """
    special = special_tokens(tokenizer, config)
    if config.longest <= special.total:
        raise CorpusError(
            f"`max_tokens={config.longest}` leaves no room for text: the tokenizer adds {special.total} special"
            " tokens. Raise `max_tokens`"
        )
    report = CorpusReport() if report is None else report
    read = _sequences if config.limit_sequences is None else _drawn_sequences
    return read(corpus, tokenizer, config, special, report)


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
        if (sequence := _sequence(index, piece, config, special, report)) is not None:
            yield sequence
            index += 1
    if index == 0:
        raise _no_sequence_error(corpus, config, report)


def _sequence(
    index: int, piece: _Piece, config: TokenConfig, special: Special, report: CorpusReport
) -> TokenSequence | None:
    """Return the sequence of a piece, None if it is too short, and count it."""
    size = len(piece.body) + special.total
    report.truncated += bool(piece.lost)
    report.dropped_tokens += piece.lost
    report.partly_tokenised += piece.unread
    if not _is_long_enough(piece, config, special):
        report.too_short += 1
        report.dropped_tokens += len(piece.body)
        report.add_example("too_short", f"{piece.document.source} ({size} tokens)")
        return None
    report.sequences += 1
    report.tokens += size
    ids, document = special.around(piece.body), piece.document
    return TokenSequence(
        index, document.index, document.source, ids, bool(piece.lost), hash_ids(ids)[:16], block=piece.block
    )


def _is_long_enough(piece: _Piece, config: TokenConfig, special: Special) -> bool:
    size = len(piece.body) + special.total
    return bool(len(piece.body)) and size >= (config.longest if config.mode == "pack" else config.min_tokens)


def _drawn_sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: TokenConfig, special: Special, report: CorpusReport
) -> Iterator[TokenSequence]:
    report.add_skipped(corpus.skipped)
    limit, room = config.limit_sequences or 0, config.longest - special.total
    # A block has several sequences, of which its hash chooses; a pack has whole blocks.
    size = max(BLOCK, _BLOCK_CHARACTERS * config.longest)
    if config.mode == "pack":
        size = _PACK_CHARACTERS * config.longest
    draw = Draw(
        corpus, size=size, beginnings=config.mode == "truncate", wanted=size * limit, on_document=report.add_document
    )
    if config.mode == "pack":
        found = _drawn_packs(draw, tokenizer, room, limit)
    else:
        found = _drawn_pieces(draw, tokenizer, config, special, limit)
    for piece in found.too_short:
        _sequence(0, piece, config, special, report)
    report.drawn = found.drawn
    for index, piece in enumerate(sorted(found.pieces, key=lambda piece: (piece.document.index, piece.block))):
        if (sequence := _sequence(index, piece, config, special, report)) is not None:
            yield sequence
    if not found.pieces:
        raise _no_sequence_error(corpus, config, report)


class _Found(NamedTuple):
    """Pieces of a draw, those of a block in their order, and the tokenised ones that are too short; ``drawn`` is None
    if the corpus has no other piece.
    """

    pieces: list[_Piece]
    too_short: list[_Piece]
    drawn: Drawn | None


class _Candidate(NamedTuple):
    """A piece; ``round`` counts the pieces of its block that are drawn before it."""

    round: int
    block: DrawnBlock
    start: int
    piece: _Piece


def _drawn_pieces(
    draw: Draw, tokenizer: PreTrainedTokenizerBase, config: TokenConfig, special: Special, limit: int
) -> _Found:
    """Draw one piece of each block in the order of the draw, and then a second one of each, until there are enough."""
    kept, stop = -(-limit // max(1, len(draw))), min(limit, len(draw))
    while True:
        candidates, too_short, left_out, start = list[_Candidate](), list[_Piece](), 0, 0
        while start < stop:
            for block, tokens in _tokenised(draw, tokenizer, start, stop):
                pieces = _pieces_of(block, tokens, config, config.longest - special.total)
                fitting = [(at, piece) for at, piece in pieces if _is_long_enough(piece, config, special)]
                too_short += [piece for _, piece in pieces if not _is_long_enough(piece, config, special)]
                candidates += [_Candidate(n, block, *each) for n, each in enumerate(fitting[:kept])]
                left_out += max(0, len(fitting) - kept)
            missing = limit - len(candidates)
            start, stop = stop, min(len(draw), stop + _further(missing, len(candidates) / stop))
        if len(candidates) >= limit or not left_out:
            break
        kept *= 4
    chosen = sorted(candidates, key=lambda each: (each.round, each.block.place))[:limit]
    files = {each.block.file for each in chosen}
    drawn = Drawn(len({each.piece.document.index for each in chosen}), len(files), draw.files)
    has_all = start == len(draw) and not left_out and len(candidates) <= limit
    in_order = [each.piece for each in sorted(chosen, key=lambda each: each.start)]
    return _Found(in_order, too_short, None if has_all else drawn)


def _tokenised(
    draw: Draw, tokenizer: PreTrainedTokenizerBase, start: int, stop: int
) -> Iterator[tuple[DrawnBlock, Iterator[Ids]]]:
    """Yield blocks of a draw with their tokens, in the order of the corpus."""
    drawn = draw.blocks(start, stop)
    while group := list(islice(drawn, _TOGETHER)):
        for block, (_, tokens) in zip(group, tokenise((block.document for block in group), tokenizer), strict=True):
            yield block, iter(()) if tokens is None else tokens


def _pieces_of(block: DrawnBlock, tokens: Iterator[Ids], config: TokenConfig, room: int) -> list[tuple[int, _Piece]]:
    """Return the pieces of a block with their first tokens' places, in the order of a hash; shorter ones come last."""
    if config.mode == "truncate":
        return [(0, piece) for piece in _truncate([(block.document, tokens)], room)]
    bodies = [body.copy() for body in _cut(tokens, room)]  # a view would keep the whole block in memory
    pieces = [
        (at, _Piece(block.document, body, block=block.number)) for at, body in enumerate(bodies) if len(body) or not at
    ]
    return sorted(pieces, key=lambda each: (len(each[1].body) < room, hash_ids(each[1].body)))


def _drawn_packs(draw: Draw, tokenizer: PreTrainedTokenizerBase, room: int, limit: int) -> _Found:
    """Join blocks in the order of the draw and cut them into pieces."""
    held: list[tuple[DrawnBlock, Ids]] = []
    start, total = 0, 0
    stop = min(len(draw), 1 + int(np.searchsorted(np.cumsum(draw.lengths), _PACK_CHARACTERS * limit * room)))
    while start < stop:
        for block, tokens in _tokenised(draw, tokenizer, start, stop):
            held.append((block, np.concatenate([np.empty(0, dtype=np.int32), *tokens])))
            total += len(held[-1][1])
        start, stop = stop, min(len(draw), stop + _further(limit * room - total, total / stop))
    held.sort(key=lambda each: each[0].place)
    joined = ((block.document, iter((ids,))) for block, ids in held)
    pieces = list(islice(_pack(joined, room, tokenizer.eos_token_id), limit + 1))
    full = [piece for piece in pieces if len(piece.body) == room]
    files = {block.document.index: block.file for block, _ in held}
    documents = {piece.document.index for piece in full[:limit]}
    drawn = Drawn(len(documents), len({files[index] for index in documents}), draw.files)
    has_all = start == len(draw) and len(full) <= limit
    return _Found(full[:limit], pieces[len(full) :] if has_all else [], None if has_all else drawn)


def _further(missing: float, rate: float) -> int:
    """Return how many blocks are read next, if so many texts are missing and the blocks had ``rate`` texts each."""
    return 0 if missing <= 0 else 8 + int(1.25 * missing / max(rate, 1 / 16))


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
                yield _Piece(document, body, block=number * room // _BLOCK_TOKENS)


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
        # Few verbs have an option for the shortest sequence, and those that pack have one for the longest.
        least, remedy = config.min_tokens, "Give longer texts"
        if config.mode == "pack":
            least, remedy = config.longest, "Lower `max_tokens`, or give more text"
        fix = f"a {config.mode} sequence needs {least} tokens. {remedy}"
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


def read_spread(
    corpus: CorpusSpec,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    count: int,
    *,
    shortest: int,
    mode: TokenMode = "chunk",
) -> list[TokenSequence]:
    """Draw ``count`` texts (or all) of ``shortest`` to ``tokens`` tokens from all files of a corpus."""
    config = TokenConfig(tokens, mode=mode, min_tokens=shortest, limit_sequences=count)
    return list(sequences(open_corpus(corpus), tokenizer, config))


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` items spread evenly over all; all of them if they are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
