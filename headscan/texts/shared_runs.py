"""Text that two sets of texts share: runs of 20 words that are in both.

Equal documents are not the only shared text: copies differ by a line break, or one file holds another. Words are
letters and digits, without their case; every other character, with its repetitions, is one of its own, and white space
counts for nothing.
Runs are hashed with numpy and sorted: 100 MB of text take about 10 s of CPU and 2 GB of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

#: Words of a run.
RUN = 20
#: Share of its runs from which a text counts as a copy.
MOST_SHARED = 0.05
#: Characters from which a text of fewer words is one run; shorter ones, such as headings, are often equal.
_LEAST_CHARACTERS = 100
#: Documents from which a run that more than half of them have, such as a licence, is the form of the corpus.
_FORM_DOCUMENTS = 20
#: Bytes that are hashed together.
_BATCH_BYTES = 1 << 21

#: Classes of bytes: white space, parts of words, other ASCII characters, and first bytes of characters from U+0800 on,
#: whose scripts often have no spaces.
_SPACE, _WORD, _OTHER, _WIDE = range(4)


def _classes() -> NDArray[np.uint8]:
    classes = np.full(256, _OTHER, dtype=np.uint8)
    for byte in range(256):
        if byte <= 32:
            classes[byte] = _SPACE
        elif byte >= 0xE0:
            classes[byte] = _WIDE
        elif byte >= 0x80 or chr(byte).isalnum() or byte == ord("_"):
            classes[byte] = _WORD
    return classes


_CLASSES = _classes()
_HASHES = np.random.default_rng(0).integers(0, 1 << 64, 256, dtype=np.uint64)
_HASHES[_CLASSES == _SPACE] = 0
_HASHES[ord("A") : ord("Z") + 1] = _HASHES[ord("a") : ord("z") + 1]
#: Odd, so that it has an inverse modulo 2**64.
_BASE = 0x9E3779B97F4A7C15


class SharedRuns:
    """The runs of some texts, to find those that are in others.

    Args:
        texts: The texts.
        documents: The number of each text's document, from 0 on, not descending; None takes every text as one.
    """

    def __init__(self, texts: Sequence[str], documents: Sequence[int] | None = None) -> None:
        hashed = list(_hashed(texts))
        self._owners = np.concatenate([np.empty(0, np.int64), *(owners for _, owners in hashed)])
        hashes = np.concatenate([np.empty(0, np.uint64), *(hashes for hashes, _ in hashed)])
        _, self._runs = np.unique(hashes, return_inverse=True)
        self._texts = len(texts)
        self._totals = np.bincount(self._owners, minlength=self._texts)
        of_text = np.arange(self._texts) if documents is None else np.asarray(documents, dtype=np.int64)
        self._counted = ~self._is_form(of_text[self._owners], int(of_text.max(initial=-1)) + 1)

    def _is_form(self, documents: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
        """Return True for runs that more than half of the documents have. In a document with more of these than of
        others they are its text.
        """
        form = np.zeros(len(self._runs), dtype=bool)
        if count < _FORM_DOCUMENTS:
            return form
        often = (np.bincount(self._runs) > count / 2)[self._runs]
        pairs = np.unique(np.stack([self._runs[often], documents[often]]), axis=1)
        form_runs = np.bincount(pairs[0], minlength=self._runs.max(initial=-1) + 1) > count / 2
        form = form_runs[self._runs]
        of_form = np.bincount(documents, weights=form, minlength=count)
        return form & (of_form <= np.bincount(documents, minlength=count) / 2)[documents]

    def shares(self, among: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the share of each text's runs, 0 to 1, that are in the texts where ``among`` is True."""
        present = np.zeros(int(self._runs.max(initial=-1)) + 1, dtype=bool)
        present[self._runs[among[self._owners]]] = True
        return self._share(present[self._runs])

    def earlier(self, among: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the share of each text's runs, 0 to 1, that are in an earlier text where ``among`` is True."""
        first = np.full(int(self._runs.max(initial=-1)) + 1, self._texts)
        at = np.flatnonzero(among[self._owners])[::-1]  # the first text of a run is written last
        first[self._runs[at]] = self._owners[at]
        return self._share(first[self._runs] < self._owners)

    def _share(self, shared: NDArray[np.bool_]) -> NDArray[np.float64]:
        count = np.bincount(self._owners, weights=shared & self._counted, minlength=self._texts)
        return count / np.maximum(self._totals, 1)


def shares_with(texts: Sequence[str], others: Sequence[str]) -> NDArray[np.float64]:
    """Return the share of each text's runs, 0 to 1, that are in other texts."""
    among = np.arange(len(texts) + len(others)) >= len(texts)
    return SharedRuns([*texts, *others]).shares(among)[: len(texts)]


def _hashed(texts: Sequence[str]) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Yield hashes of the runs of texts, with the texts' numbers."""
    batch, first, size = list[bytes](), 0, 0
    for number, text in enumerate(texts):
        batch.append(text.encode("utf-8", "replace"))
        size += len(batch[-1])
        if size >= _BATCH_BYTES or number + 1 == len(texts):
            hashes, owners = _of_batch(batch)
            yield hashes, owners + first
            batch, first, size = [], number + 1, 0


def _of_batch(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    content = np.frombuffer(b"\n".join([*texts, b""]), dtype=np.uint8)
    classes = _CLASSES[content]
    before = np.concatenate([[_SPACE], classes[:-1]])
    begins = (classes >= _OTHER) | ((classes == _WORD) & ((before == _SPACE) | (before == _OTHER)))
    begins[1:] &= (classes[1:] != _OTHER) | (content[1:] != content[:-1])  # a line of dashes is one word
    starts = np.flatnonzero(begins)
    # White space adds nothing to a hash, so that a word may reach to the next one.
    words = _spans(_HASHES[content], starts, np.append(starts[1:], len(content))[: len(starts)])
    words ^= words >> np.uint64(29)
    words *= np.uint64(_BASE)
    lengths = np.array([len(text) for text in texts])
    ends = np.cumsum(lengths + 1)
    owners = np.searchsorted(ends, starts, side="right")
    counts = np.bincount(owners, minlength=len(texts))
    # A text of fewer words has one run if it is long enough.
    runs = np.where(counts >= RUN, counts - RUN + 1, (counts > 0) & (lengths >= _LEAST_CHARACTERS))
    run_owners = np.repeat(np.arange(len(texts)), runs)
    first_words, first_runs = np.cumsum(counts) - counts, np.cumsum(runs) - runs
    at = np.arange(len(run_owners)) - first_runs[run_owners] + first_words[run_owners]
    return _spans(words, at, at + np.minimum(counts, RUN)[run_owners]), run_owners


def _spans(values: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return polynomial hashes modulo 2**64 of spans of values, which do not depend on the place of a span."""
    powers = np.full(len(values) + 1, _BASE, dtype=np.uint64)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    inverses = np.full(len(values) + 1, pow(_BASE, -1, 1 << 64), dtype=np.uint64)
    inverses[0] = 1
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * powers[:-1], out=sums[1:])
    return (sums[ends] - sums[starts]) * inverses[starts]
