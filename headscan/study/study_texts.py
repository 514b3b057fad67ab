"""The texts of a study: one part measures, one chooses between criteria, one judges."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headscan.runs.model_identity import fingerprint
from headscan.runs.progress import at_work
from headscan.store.output_files import write_text
from headscan.study.study_step import StudyError
from headscan.text_tables import percent
from headscan.texts import CorpusSpec, open_corpus
from headscan.texts.drawing import Draw, blocks, content_key
from headscan.texts.shared_runs import MOST_SHARED, RUN, SharedRuns

#: Characters from which one of a few documents is cut into all parts.
_LEAST_CUT = 5_000
#: Characters that are read of a corpus: of a larger one, blocks are drawn from all files.
_MOST = 16_000_000
#: Documents from which whole documents go to one part; fewer are cut, each into all parts.
_WHOLE = 20
#: Characters from which equal documents are one text; shorter ones, such as headings, are often equal.
_LEAST_SHARED = 100
#: Share of its runs that an earlier block of its part has from which a block is a copy.
_COPY = 0.5
#: The way of reading and splitting; the parts of an earlier one are refused.
_SPLIT = "drawn by hash, parts without shared runs"
_MEASURE, _CHOOSE, _JUDGE = "measure", "choose", "judge"
#: Parts by their share of the text, in tenths.
_PARTS = {_MEASURE: 4, _CHOOSE: 2, _JUDGE: 4}


@dataclass(frozen=True)
class StudyTexts:
    """Folders of text files, one block each."""

    folder: Path

    @property
    def measure(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / _MEASURE))

    @property
    def choose(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / _CHOOSE))

    @property
    def judge(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / _JUDGE))

    @property
    def judged_files(self) -> list[Path]:
        return sorted((self.folder / _JUDGE).glob("*.txt"))

    @property
    def other_files(self) -> list[Path]:
        """Files that measure or choose."""
        return sorted(file for part in (_MEASURE, _CHOOSE) for file in (self.folder / part).glob("*.txt"))


#: Between the numbers of a block and of its document in the name of a block's file.
_OF_DOCUMENT = " of document "


def document_of(name: str | Path) -> str:
    """Return the number of the document that a block's file is of, or the name of another file."""
    name = Path(name)
    return name.stem.partition(_OF_DOCUMENT)[2] or name.name


class _Text(NamedTuple):
    """A document."""

    source: str
    text: str


class _Block(NamedTuple):
    """A block of a document, whose number it has."""

    document: int
    source: str
    text: str


def split_texts(
    corpus: CorpusSpec, folder: Path, judge: CorpusSpec | None = None, say: Callable[[str], None] = lambda line: None
) -> StudyTexts:
    """Write the parts of a corpus as files, unless they are there.

    Of many documents, whole ones go to each part, in the order of a hash. Of a few, long ones are cut into all parts,
    each part into blocks, and each short one goes to the part that has least of its share. A block of which more than
    5 % of the runs of 20 words are in another part is moved to the part that measures, and copies within a part are
    left out. ``judge`` None takes the texts that judge from the corpus; other texts that share as much with the corpus
    are refused. ``say`` receives the largest share that is left, and the numbers of moved blocks and of copies.
    """
    with at_work(f"reading {corpus.name}"):
        documents = _documents(corpus)
        judging = [] if judge is None else _documents(judge)
    content = fingerprint(
        {"split": _SPLIT, "corpus": [each.text for each in documents], "judge": [each.text for each in judging]}
    )
    mark = folder / "content"
    if folder.exists():
        if not mark.exists() or mark.read_text(encoding="utf-8") != content:
            raise StudyError(
                f"{folder} has the texts of another corpus, or of an earlier version of headscan: `corpus` or `judge`"
                " changed. Restore them, or choose another folder as `out`"
            )
        return StudyTexts(folder)
    if judge is None:
        parts = _assigned(documents, _PARTS, corpus)
    else:
        measuring = {part: share for part, share in _PARTS.items() if part != _JUDGE}
        parts = _assigned(documents, measuring, corpus)
        parts |= _assigned(judging, {_JUDGE: _PARTS[_JUDGE]}, judge, first=len(documents))
    with at_work("text that blocks share"):
        parts = _unshared(parts, corpus, judge, say)
    # A folder of that name is complete, and a stopped run leaves none of its files in another part.
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part, of_part in parts.items():
        for number, block in enumerate(of_part):
            write_text(unfinished / part / f"{number:05}{_OF_DOCUMENT}{block.document}.txt", block.text)
    write_text(unfinished / mark.name, content)
    unfinished.rename(folder)
    return StudyTexts(folder)


def _documents(corpus: CorpusSpec) -> list[_Text]:
    """Return the documents, or drawn blocks of them; equal ones are returned once, so that they go to one part."""
    draw = Draw(open_corpus(corpus), wanted=_MOST)
    count = int(np.searchsorted(np.cumsum(draw.lengths), _MOST)) + 1
    sources, found = dict[int, str](), dict[int, list[str]]()
    for block in draw.blocks(0, count):
        sources[block.document.index] = block.document.source
        found.setdefault(block.document.index, []).append(block.document.text or "")
    texts = {index: "".join(of_document) for index, of_document in found.items()}
    first = {text: index for index, text in reversed(texts.items())}
    return [
        _Text(sources[index], text)
        for index, text in texts.items()
        if len(text) < _LEAST_SHARED or first[text] == index
    ]


def _assigned(
    documents: Sequence[_Text], parts: Mapping[str, int], corpus: CorpusSpec, first: int = 0
) -> dict[str, list[_Block]]:
    """Return the blocks of each part, one at least, in the order of the documents, which are numbered from ``first``
    on.
    """
    total, pieces = sum(parts.values()), dict[int, dict[str, str]]()
    filled = Counter[str]()
    names = [part for part, share in parts.items() for _ in range(share)]
    order = sorted(range(len(documents)), key=lambda number: content_key(documents[number].text))
    for place, number in enumerate(order):
        text = documents[number].text
        if len(documents) >= _WHOLE:
            pieces[number] = {names[place % total]: text}
        elif len(text) >= _LEAST_CUT:
            pieces[number] = _cut(text, parts)
        else:
            pieces[number] = {min(parts, key=lambda part: filled[part] / parts[part]): text}
        filled.update({part: len(piece) for part, piece in pieces[number].items()})
    assigned: dict[str, list[_Block]] = {part: [] for part in parts}
    for number, document in enumerate(documents):
        for part, piece in pieces[number].items():
            of_piece = filter(str.strip, blocks([piece]))
            assigned[part] += [_Block(first + number, document.source, block) for block in of_piece]
    if not all(assigned.values()):
        raise StudyError(
            f"{corpus.name} is too short for {len(parts)} part{'s' * (len(parts) > 1)} of a study: documents with text:"
            f" {len(documents)} (limit {len(parts)}, or one of {_LEAST_CUT:,} characters). Give more text"
        )
    return assigned


def _unshared(
    parts: dict[str, list[_Block]], corpus: CorpusSpec, judge: CorpusSpec | None, say: Callable[[str], None]
) -> dict[str, list[_Block]]:
    """Return the parts without blocks that share much text with another part: these measure. Raise if the texts that
    judge are of another corpus and share much with this one, or if no text is left to a part.
    """
    every = [block for of_part in parts.values() for block in of_part]
    part_of = np.repeat(np.array(list(parts)), [len(of_part) for of_part in parts.values()])
    by_document = np.argsort([block.document for block in every], kind="stable")
    every, part_of = [every[at] for at in by_document], part_of[by_document]
    runs = SharedRuns([block.text for block in every], [block.document for block in every])
    if judge is not None:
        _refuse_shared(every, part_of == _JUDGE, runs.shares(part_of != _JUDGE), corpus, judge)
    before = part_of.copy()
    while True:
        measured, others = runs.shares(part_of == _MEASURE), runs.shares(part_of != _JUDGE)
        copies = (part_of == _CHOOSE) & (measured > MOST_SHARED) | (part_of == _JUDGE) & (others > MOST_SHARED)
        if not copies.any():
            break
        part_of[copies] = _MEASURE
    for part in parts:
        if not (part_of == part).any():
            raise StudyError(
                f"every block of {corpus.name} that would {part} shares more than {percent(MOST_SHARED)} of its runs of"
                f" {RUN} words with other blocks. Remove copies, or give other texts"
            )
    largest, moved = others[part_of == _JUDGE].max(), int((part_of != before).sum())
    # Copies in one part would count as texts of their own.
    is_copy = np.any([(part_of == part) & (runs.earlier(part_of == part) > _COPY) for part in parts], axis=0)
    notes = [
        f"texts that judge share at most {percent(largest)} of their runs of {RUN} words with the other parts (limit"
        f" {percent(MOST_SHARED)})",
        f"blocks that shared more and measure instead: {moved} of {len(every)}" if moved else "",
        f"copies of blocks that are left out: {is_copy.sum()}" if is_copy.any() else "",
    ]
    say("; ".join(filter(None, notes)))
    return {part: [every[at] for at in np.flatnonzero((part_of == part) & ~is_copy).tolist()] for part in parts}


def _refuse_shared(
    every: Sequence[_Block], judging: np.ndarray, shares: np.ndarray, corpus: CorpusSpec, judge: CorpusSpec
) -> None:
    """Raise if blocks of the texts that judge share much text with the corpus."""
    shares = np.where(judging, shares, 0.0)
    if (worst := float(shares.max())) > MOST_SHARED:
        sources = {every[at].source for at in np.flatnonzero(shares > MOST_SHARED).tolist()}
        judges = {every[at].source for at in np.flatnonzero(judging).tolist()}
        raise StudyError(
            f"{len(sources)} of {len(judges)} documents of `judge`"
            f" ({judge.name}) share text with `corpus` ({corpus.name}): {every[int(shares.argmax())].source} has"
            f" {percent(worst)} of its runs of {RUN} words there (limit {percent(MOST_SHARED)}). Remove them from one"
            " of the two, or leave out `judge`"
        )


def _cut(text: str, parts: Mapping[str, int]) -> dict[str, str]:
    """Return consecutive pieces in proportion to the parts' shares; they end at line breaks where there are some."""
    pieces, start = {}, 0
    for part, tenths in zip(parts, accumulate(parts.values()), strict=True):
        end = len(text) * tenths // sum(parts.values())
        stop = end if end == len(text) else text.rfind("\n", (start + end) // 2, end) + 1 or end
        pieces[part] = text[start:stop]
        start = stop
    return pieces
