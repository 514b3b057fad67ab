"""The texts of a study: one part measures, one chooses between criteria, one judges."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from headscan.runs.model_identity import fingerprint
from headscan.store.output_files import write_text
from headscan.study.study_step import StudyError
from headscan.texts import CorpusSpec, open_corpus

#: Characters of a block: texts of one block are about as dependent as those of one document.
_BLOCK = 20_000
#: Characters from which one of a few documents is cut into all parts.
_LEAST_CUT = 5_000
#: Characters that are read from a corpus.
_MOST = 16_000_000
#: Documents from which whole documents go to one part; fewer are cut, each into all parts.
_WHOLE = 20
#: Characters from which equal documents are one text; shorter ones, such as headings, are often equal.
_LEAST_SHARED = 100
_JUDGE = "judge"
#: Parts by their share of the text, in tenths.
_PARTS = {"measure": 4, "choose": 2, _JUDGE: 4}


@dataclass(frozen=True)
class StudyTexts:
    """Folders of text files, one block each."""

    folder: Path

    @property
    def measure(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / "measure"))

    @property
    def choose(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / "choose"))

    @property
    def judge(self) -> CorpusSpec:
        return CorpusSpec(str(self.folder / "judge"))

    @property
    def judged_files(self) -> list[Path]:
        return sorted((self.folder / "judge").glob("*.txt"))


def split_texts(corpus: CorpusSpec, folder: Path, judge: CorpusSpec | None = None) -> StudyTexts:
    """Write the parts of a corpus as files, unless they are there; no part shares text with another.

    Of many documents, whole ones go to each part. Of a few, long ones are cut into all parts, each part into blocks,
    and each short one goes to the part that has least of its share.
    ``judge`` None takes the texts that judge from the corpus.
    """
    documents = list(_documents(corpus))
    judging = [] if judge is None else list(_documents(judge))
    content = fingerprint({"corpus": [text for _, text in documents], "judge": [text for _, text in judging]})
    mark = folder / "content"
    if folder.exists():
        if not mark.exists() or mark.read_text(encoding="utf-8") != content:
            raise StudyError(
                f"{folder} has the texts of another corpus, or of an earlier version of headscan: `corpus` or `judge`"
                " changed. Restore them, or choose another folder as `out`"
            )
        return StudyTexts(folder)
    if judge is None:
        blocks = _assigned(documents, _PARTS, corpus)
    else:
        _refuse_shared(corpus, documents, judge, judging)
        measuring = {part: share for part, share in _PARTS.items() if part != _JUDGE}
        blocks = _assigned(documents, measuring, corpus) | _assigned(judging, {_JUDGE: _PARTS[_JUDGE]}, judge)
    # A folder of that name is complete, and a stopped run leaves none of its files in another part.
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part, texts in blocks.items():
        for number, text in enumerate(texts):
            write_text(unfinished / part / f"{number:05}.txt", text)
    write_text(unfinished / mark.name, content)
    unfinished.rename(folder)
    return StudyTexts(folder)


def _refuse_shared(
    corpus: CorpusSpec, documents: list[tuple[str, str]], judge: CorpusSpec, judging: list[tuple[str, str]]
) -> None:
    """Raise if a document is in both corpora, by its text."""
    sources = {text: source for source, text in documents if len(text) >= _LEAST_SHARED}
    shared = [(source, sources[text]) for source, text in judging if text in sources]
    if shared:
        source, other = shared[0]
        raise StudyError(
            f"{len(shared)} of {len(judging)} documents of `judge` ({judge.name}) are also in `corpus` ({corpus.name}):"
            f" {source} equals {other} (limit 0). Remove them from one of the two, or leave out `judge`"
        )


def _documents(corpus: CorpusSpec) -> Iterator[tuple[str, str]]:
    """Return names and texts of the documents; equal ones are returned once, so that they go to one part."""
    left, seen = _MOST, set[str]()
    for document in open_corpus(corpus).documents():
        if document.content is None or left <= 0:
            continue
        pieces, room = [], left
        for piece in document.content.pieces():
            pieces.append(piece[:room])
            room -= len(pieces[-1])
            if not room:
                break
        text = "".join(pieces)
        if text in seen:
            continue
        left = room
        if len(text) >= _LEAST_SHARED:
            seen.add(text)
        yield document.source, text


def _assigned(
    documents: Sequence[tuple[str, str]], parts: Mapping[str, int], corpus: CorpusSpec
) -> dict[str, list[str]]:
    """Return the blocks of each part, one at least, in the order of the documents."""
    texts, total = [text for _, text in documents], sum(parts.values())
    assigned: dict[str, list[str]] = {part: [] for part in parts}
    if len(texts) >= _WHOLE:
        names = [part for part, share in parts.items() for _ in range(share)]
        # 7 has no divisor in common with the numbers of parts, so that neighbours go to different ones.
        for number, text in enumerate(texts):
            assigned[names[7 * number % total]] += _blocks(text)
    else:
        filled = Counter[str]()
        for text in filter(str.strip, texts):
            least = min(parts, key=lambda part: filled[part] / parts[part])
            pieces = _cut(text, parts) if len(text) >= _LEAST_CUT else {least: text}
            for part, piece in pieces.items():
                filled[part] += len(piece)
                assigned[part] += _blocks(piece)
    if not all(assigned.values()):
        raise StudyError(
            f"{corpus.name} is too short for {len(parts)} part{'s' * (len(parts) > 1)} of a study: documents with text:"
            f" {sum(bool(text.strip()) for text in texts)} (limit {len(parts)}, or one of {_LEAST_CUT:,} characters)."
            " Give more text"
        )
    return assigned


def _cut(text: str, parts: Mapping[str, int]) -> dict[str, str]:
    """Return consecutive pieces in proportion to the parts' shares; they end at line breaks where there are some."""
    pieces, start = {}, 0
    for part, tenths in zip(parts, accumulate(parts.values()), strict=True):
        end = len(text) * tenths // sum(parts.values())
        stop = end if end == len(text) else text.rfind("\n", (start + end) // 2, end) + 1 or end
        pieces[part] = text[start:stop]
        start = stop
    return pieces


def _blocks(text: str) -> list[str]:
    """Return consecutive blocks that end at line breaks where there are some."""
    blocks, start = [], 0
    while start < len(text):
        end = text.rfind("\n", start + _BLOCK // 2, start + _BLOCK) + 1 or start + _BLOCK
        if len(text) - end < _BLOCK // 2:
            end = len(text)
        blocks.append(text[start:end])
        start = end
    return [block for block in blocks if block.strip()]
