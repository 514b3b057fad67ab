"""The texts of a study: one part measures, one chooses between criteria, one judges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headscan.analysis.store.output_files import write_text
from headscan.pipelines.corpora import CorpusSpec, open_corpus
from headscan.pipelines.study.study_config import StudyError

#: Characters of a block: texts of one block are about as dependent as those of one document.
_BLOCK, _LEAST_BLOCK = 20_000, 500
#: Characters that are read from a corpus.
_MOST = 16_000_000
#: Documents from which whole documents go to one part; fewer are cut, each into all parts.
_WHOLE = 20
#: Parts of ten blocks.
_JUDGE = "judge"
_PARTS = (*["measure"] * 4, *["choose"] * 2, *[_JUDGE] * 4)


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

    Of many documents, whole ones go to each part. A few long ones are cut into blocks, and consecutive blocks stay in
    one part.

    Args:
        judge: Texts that judge; None takes a part of the corpus.
    """
    done = folder / "parts"
    if not done.exists():
        if judge is None:
            blocks = _assigned(list(_documents(corpus)), _PARTS)
        else:
            blocks = _assigned(list(_documents(corpus)), tuple(part for part in _PARTS if part != _JUDGE))
            blocks += _assigned(list(_documents(judge)), (_JUDGE,))
        for part in dict.fromkeys(_PARTS):
            texts = [text for name, text in blocks if name == part]
            if not texts:
                name = judge.name if judge is not None and part == _JUDGE else corpus.name
                raise StudyError(
                    f"{name} is too short for the parts of a study (limit {len(_PARTS) * _LEAST_BLOCK} characters)."
                    " Give more text"
                )
            for number, text in enumerate(texts):
                write_text(folder / part / f"{number:05}.txt", text)
        write_text(done, ", ".join(dict.fromkeys(_PARTS)))
    return StudyTexts(folder)


def _documents(corpus: CorpusSpec) -> Iterator[str]:
    left = _MOST
    for document in open_corpus(corpus).documents():
        if document.content is None or left <= 0:
            continue
        pieces = []
        for piece in document.content.pieces():
            pieces.append(piece[:left])
            left -= len(piece)
            if left <= 0:
                break
        yield "".join(pieces)


def _assigned(documents: list[str], parts: tuple[str, ...]) -> list[tuple[str, str]]:
    if len(documents) >= _WHOLE:
        # 7 has no divisor in common with the numbers of parts, so that neighbours go to different ones.
        return [
            (parts[7 * number % len(parts)], text)
            for number, document in enumerate(documents)
            for text in _blocks(document, _BLOCK)
        ]
    assigned: list[tuple[str, str]] = []
    for document in documents:
        size = min(_BLOCK, len(document) // len(parts))
        blocks = _blocks(document, size) if size >= _LEAST_BLOCK else []
        assigned += [(parts[len(parts) * number // len(blocks)], text) for number, text in enumerate(blocks)]
    return assigned


def _blocks(document: str, size: int) -> list[str]:
    """Return consecutive blocks that end at line breaks where there are some."""
    blocks, start = [], 0
    while start < len(document):
        end = document.rfind("\n", start + size // 2, start + size) + 1 or start + size
        if len(document) - end < size // 2:
            end = len(document)
        blocks.append(document[start:end])
        start = end
    return [block for block in blocks if block.strip()]
