"""Draw blocks of text from all files of a corpus by a hash of their content.

A job that reads a part of a corpus must not read the first texts of the first files, because it would measure these
files alone. Documents are therefore cut into blocks, and a hash of a block's text decides its place in the draw: one
block of each file comes first, then all others, then copies of blocks. Neither names nor positions matter, a repeated
draw is the same draw, and a longer draw begins with the shorter one. The corpus is read once, and files with drawn
blocks again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headscan.settings.corpus_settings import CorpusError
from headscan.texts.corpus import Corpus
from headscan.texts.documents import Document, StringText

#: The way of drawing; a run that reads a drawn part of a corpus is another run after a change of it.
DRAWN = "blocks by hash, each file first"
#: Characters of a block: texts of one block are about as dependent as those of one document.
BLOCK = 20_000
#: Characters that are read of each file in any case.
_LEAST_OF_FILE = 1 << 20


def content_key(text: str) -> int:
    """Return a hash of a text, from 0 to 2**63 - 1. The smallest ones are drawn first."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def blocks(pieces: Iterable[str], size: int = BLOCK) -> Iterator[str]:
    """Yield a text in consecutive blocks of half to one and a half times ``size`` characters; a shorter text is one
    block. Blocks end at line breaks, or else at spaces, where there are some.
    """
    held, start = "", 0
    for piece in pieces:
        held, start = held[start:] + piece, 0
        while len(held) - start >= size + size // 2:
            end = _end(held, start, size)
            yield held[start:end]
            start = end
    if len(held) - start > size and len(held) - (end := _end(held, start, size)) >= size // 2:
        yield held[start:end]
        start = end
    if start < len(held):
        yield held[start:]


def _end(text: str, start: int, size: int) -> int:
    for mark in "\n ":
        if end := text.rfind(mark, start + size // 2, start + size) + 1:
            return end
    return start + size


class DrawnBlock(NamedTuple):
    """A document whose content is one block alone, or the whole one in a draw of beginnings; the number of its file,
    that of the block in the document, and its place in the draw.
    """

    document: Document
    file: int
    number: int
    place: int


class _Read(NamedTuple):
    """A block as it is read. ``nth`` counts the documents of its file."""

    nth: int
    document: Document
    number: int
    text: str


class Draw:
    """The order in which the blocks of a corpus are drawn.

    Attributes:
        lengths: Characters of the blocks, in this order (blocks,).
        files: Number of files with text.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        size: int = BLOCK,
        beginnings: bool = False,
        wanted: int = 0,
        on_document: Callable[[Document], None] = lambda document: None,
    ) -> None:
        """Read a corpus.

        Args:
            size: Characters of a block.
            beginnings: Draw documents by their first block with text.
            wanted: Characters that a file's share must allow if the corpus is longer than ``corpus.most_characters``:
                then each file is read up to its share, from its beginning.
            on_document: Called with every document, including those with problems.
        """
        self._corpus, self._size, self._beginnings = corpus, size, beginnings
        most = max(corpus.most_characters, wanted)
        self._of_file = max(_LEAST_OF_FILE, most // max(1, corpus.file_count))
        rows = array("q")
        for file, documents in enumerate(corpus.files()):
            for read in self._read(documents, on_document):
                key = content_key(read.text)
                rows.extend((key, len(read.text), file, read.nth, read.number, read.document.index))
        facts = np.array(rows, dtype=np.int64).reshape(-1, 6)
        self._facts = facts[_order(facts[:, 0], facts[:, 2])]
        self.lengths = self._facts[:, 1]
        self.files = len(np.unique(facts[:, 2]))

    def __len__(self) -> int:
        return len(self._facts)

    def blocks(self, start: int, stop: int) -> Iterator[DrawnBlock]:
        """Yield the blocks of some places in the draw, in the order of the corpus."""
        wanted: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        for place, (file, nth, number) in enumerate(self._facts[start:stop, 2:5].tolist(), start):
            wanted[file][nth, number] = place
        for file, documents in enumerate(self._corpus.files()):
            if not (of_file := wanted.get(file, {})):
                continue
            for read in self._read(documents):
                if (place := of_file.pop((read.nth, read.number), -1)) < 0:
                    continue
                if content_key(read.text) != self._facts[place, 0]:
                    raise self._changed()
                content = read.document.content if self._beginnings else StringText(read.text)
                document = replace(read.document, index=int(self._facts[place, 5]), content=content)
                yield DrawnBlock(document, file, read.number, place)
                if not of_file:
                    break
            if of_file:
                raise self._changed()

    def _changed(self) -> CorpusError:
        return CorpusError(f"{self._corpus.description} changed while it was read. Run the same command again")

    def _read(
        self, documents: Iterator[Document], on_document: Callable[[Document], None] = lambda document: None
    ) -> Iterator[_Read]:
        """Yield the blocks of a file, up to its share."""
        left = self._of_file
        for nth, document in enumerate(documents):
            on_document(document)
            if document.content is None:
                continue
            for number, text in enumerate(blocks(document.content.pieces(), self._size)):
                if not text.strip():
                    continue
                left -= len(text)
                yield _Read(nth, document, number, text)
                if self._beginnings or left <= 0:
                    break
            if left <= 0:
                return


def draw_items(texts: Iterable[str], count: int | None) -> list[int]:
    """Return the numbers of ``count`` texts, ascending, that a hash draws; None takes all. Copies come last."""
    keys = np.array([content_key(text) for text in texts], dtype=np.int64)
    return sorted(_order(keys, np.zeros_like(keys))[:count].tolist())


def _order(keys: np.ndarray, files: np.ndarray) -> np.ndarray:
    """Return the order of a draw from the hashes and files of blocks."""
    by_key = np.argsort(keys, kind="stable")
    same = np.concatenate([[False], keys[by_key][1:] == keys[by_key][:-1]])[: len(keys)]
    # The number of earlier blocks with the same hash.
    counted = np.arange(len(keys))
    copy = np.empty(len(keys), dtype=np.int64)
    copy[by_key] = counted - np.maximum.accumulate(np.where(same, 0, counted))
    rounds = copy + 1
    originals = by_key[~same]
    _, first = np.unique(files[originals], return_index=True)
    rounds[originals[first]] = 0
    return np.lexsort((keys, rounds))
