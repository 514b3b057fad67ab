"""Tokens of documents of any length, in constant memory.

Near a cut, a text has other tokens than the whole text. A long document is therefore tokenised in overlapping windows.
Two windows are joined inside their overlap, where both have the same tokens on either side: there neither is affected
by its own cut, and the joined tokens are those of the whole text.

- At the beginning of a *word* (a piece that the pre-tokenizer separates and the model tokenises alone) this holds for
  every model: pre-tokenizers work from left to right and look a bounded number of characters ahead.
- Within a word it holds for BPE that drops no characters. There a sequence of tokens is the encoding of its text if
  every pair of neighbours is the encoding of theirs, and every pair of the joined sequence is from one of the windows.
  (On the range of a character's effect in BPE: Berglund and van der Merwe, arXiv 2309.08715.)

If a window cannot be joined to the next, it is tokenised again at twice its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import combining

import numpy as np
from numpy.typing import NDArray

from headscan.settings.corpus_settings import CorpusError
from headscan.texts.documents import Document

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Ids = NDArray[np.int32]

#: Characters of a window, and of the largest window for a text without a place to join. Tokenising needs about
#: 140 bytes of memory per character.
WINDOW_CHARACTERS = 1 << 16
LARGEST_WINDOW = 1 << 23
#: The overlap of two windows is the first window divided by this number.
_OVERLAP_PART = 16
#: Tokens on either side of a join that both windows must agree on.
_AGREED_TOKENS = 8
#: Most windows that are tokenised together, on as many threads.
_MOST_WINDOWS = 8

#: A batch of short documents ends at this number of documents or characters, whichever comes first.
_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 2_000_000


def tokenise(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, Iterator[Ids] | None]]:
    """Yield every document with its tokens, as consecutive int32 arrays without special tokens that are computed when
    they are read; None if the document has problems.
    """
    batch: list[tuple[Document, str | None]] = []
    characters = 0
    for document in documents:
        text = None if document.content is None else _Characters(document.content.pieces())
        if text is not None and not text.ends_within(WINDOW_CHARACTERS):
            yield from _whole(batch, tokenizer)
            batch, characters = [], 0
            yield document, token_pieces(text, tokenizer, document.source)
            continue
        batch.append((document, None if text is None else text.held))
        characters += 0 if text is None else len(text.held)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield from _whole(batch, tokenizer)
            batch, characters = [], 0
    yield from _whole(batch, tokenizer)


def _whole(
    batch: list[tuple[Document, str | None]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, Iterator[Ids] | None]]:
    texts = [text for _, text in batch if text is not None]
    encoded = iter(_encode(texts, tokenizer)["input_ids"] if texts else ())
    for document, text in batch:
        yield document, None if text is None else iter((np.asarray(next(encoded), dtype=np.int32),))


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    # verbose=False, because sequences are cut to the model's length later and the warning would be wrong.
    return tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )


class _Characters:
    """A text of which only the characters ``held`` are in memory, from position ``start`` on."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.held = ""
        self.start = 0
        self._pieces = pieces
        self._ended = False

    def ends_within(self, count: int) -> bool:
        """Read until more than ``count`` characters are held; return True if the text ends before."""
        while len(self.held) <= count and not self._ended:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
            else:
                self.held += piece
        return len(self.held) <= count

    def drop_before(self, position: int) -> None:
        self.held = self.held[position - self.start :]
        self.start = position


class _Window:
    """The characters of a text from ``start`` to ``stop``, tokenised alone; the ``last`` window ends the text."""

    def __init__(self, start: int, characters: str, last: bool, encoding: Encoding) -> None:
        self.start, self.stop, self.characters, self.last = start, start + len(characters), characters, last
        self.ids = np.asarray(encoding.ids, dtype=np.int32)
        self._encoding = encoding

    def tokens(self, start: int, stop: int) -> _Tokens:
        offsets, words = self._encoding.offsets, self._encoding.word_ids
        first, end = 0, len(offsets)
        while end and offsets[end - 1][1] + self.start > stop:
            end -= 1
        if start > self.start:
            first = end
            while first and offsets[first - 1][0] + self.start >= start:
                first -= 1
        kept = range(first, end)
        begins_word = [i > 0 and words[i] != words[i - 1] for i in kept]
        places = np.array(offsets[first:end], dtype=np.int64).reshape(-1, 2) + self.start
        return _Tokens(first, np.column_stack([self.ids[first:end], places, begins_word]))


class _Tokens(NamedTuple):
    """Consecutive tokens of a window from index ``first`` on. ``facts`` (tokens, 4) are the id, the start and end in
    the text, and 1 for the first token of a word.
    """

    first: int
    facts: NDArray[np.int64]

    def starts(self) -> dict[int, int]:
        """Map positions to the indices of tokens that begin there, without positions inside an earlier token."""
        starts: dict[int, int] = {}
        reached = -1
        for index, (_, start, end, _) in enumerate(self.facts.tolist()):
            if start >= reached:
                starts.setdefault(start, index)
            reached = max(reached, end)
        return starts


def token_pieces(text: _Characters, tokenizer: PreTrainedTokenizerBase, source: str) -> Iterator[Ids]:
    """Yield the tokens of a long text, window by window; ``source`` names the document in errors."""
    if not tokenizer.is_fast:
        if not text.ends_within(LARGEST_WINDOW):
            raise CorpusError(
                f"{source} has more than {LARGEST_WINDOW:,} characters, and the tokenizer cannot tokenise it in parts, "
                "because it reports no token positions. Split the document, or use a fast tokenizer"
            )
        yield np.asarray(_encode([text.held], tokenizer)["input_ids"][0], dtype=np.int32)
        return
    within_words = _joins_within_words(tokenizer)
    (window,) = _windows(text, text.start, WINDOW_CHARACTERS, 1, tokenizer)
    taken = 0  # tokens of the window before its join with the previous window
    ahead: list[_Window] = []
    together = 1
    while not window.last:
        size = window.stop - window.start
        if not ahead:
            overlap = size // _OVERLAP_PART
            ahead = _windows(text, window.stop - overlap, max(WINDOW_CHARACTERS, 4 * overlap), together, tokenizer)
            together = min(2 * together, _MOST_WINDOWS)
        join = _join(window, ahead[0], within_words)
        if join is None:
            known = window.ids[: taken + _AGREED_TOKENS]
            ahead = _windows(text, window.start, 2 * size, 1, tokenizer) if 2 * size <= LARGEST_WINDOW else []
            if not ahead or not np.array_equal(ahead[0].ids[: len(known)], known):
                raise CorpusError(
                    f"{source} cannot be tokenised in parts: after character {window.start:,} the tokenizer finds no "
                    f"place to cut within {LARGEST_WINDOW:,} characters. Split the document, or break its lines"
                )
            window = ahead.pop()
            continue
        before, after = join
        yield window.ids[taken:before]
        window, taken = ahead.pop(0), after
        text.drop_before(window.start)
    yield window.ids[taken:]


def _windows(text: _Characters, start: int, size: int, count: int, tokenizer: PreTrainedTokenizerBase) -> list[_Window]:
    step = size - size // _OVERLAP_PART
    parts: list[tuple[int, str, bool]] = []
    for first in range(start, start + count * step, step):
        last = text.ends_within(first - text.start + size)
        parts.append((first, text.held[first - text.start : first - text.start + size], last))
        if last:
            break
    encodings = _encode([part for _, part, _ in parts], tokenizer).encodings or []
    return [
        _Window(first, part, last, encoding) for (first, part, last), encoding in zip(parts, encodings, strict=True)
    ]


def _join(window: _Window, following: _Window, within_words: bool) -> tuple[int, int] | None:
    """Return where two overlapping windows join, as near to the middle of their overlap as possible: the index behind
    the last token of the first one, and the index of the first token of the second one; None if they never agree.
    """
    overlap = window.stop - following.start
    left, right = (each.tokens(following.start, window.stop) for each in (window, following))
    left_starts, right_starts = left.starts(), right.starts()
    middle = following.start + overlap // 2
    # Near its ends the overlap is too close to the cut of one of the windows.
    near = (position for position in left_starts if abs(position - middle) <= overlap // 4)
    common = [
        (left_starts[position], right_starts[position])
        for position in sorted(near, key=lambda position: abs(position - middle))
        # Normalisers sort all combining marks after a character, so such a run is not cut.
        if position in right_starts and not combining(following.characters[position - following.start])
    ]
    at_words = [(a, b) for a, b in common if left.facts[a, -1] and right.facts[b, -1]]
    for a, b in (*at_words, *(common if within_words else ())):
        if _agree(left.facts, right.facts, a, b):
            return left.first + a, right.first + b
    return None


def _agree(left: NDArray[np.int64], right: NDArray[np.int64], a: int, b: int) -> bool:
    """Return True if the rows on either side of ``left[a]`` and ``right[b]`` are equal."""
    if min(a, b) < _AGREED_TOKENS or max(a - len(left), b - len(right)) > -_AGREED_TOKENS:
        return False
    before, after = slice(-_AGREED_TOKENS, None), slice(_AGREED_TOKENS)
    return np.array_equal(left[:a][before], right[:b][before]) and np.array_equal(left[a:][after], right[b:][after])


def _joins_within_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if windows can be joined within a word: the model must be BPE and drop no character. After an unknown
    character that BPE drops, the positions of a word's tokens are wrong.
    """
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model = tokenizer.backend_tokenizer.model
    if not isinstance(model, BPE):
        return False
    return model.unk_token is not None or all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
