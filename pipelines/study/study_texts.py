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
#: Characters from which equal documents are one text; shorter ones, such as headings, are often equal.
_LEAST_SHARED = 100
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

    Raises:
        StudyError: The corpus is too short, or has a document that judges, too.
    """
    done = folder / "parts"
    if not done.exists():
        if judge is None:
            blocks = _assigned([text for _, text in _documents(corpus)], _PARTS)
        else:
            documents, judging = list(_documents(corpus)), list(_documents(judge))
            _refuse_shared(corpus, documents, judge, judging)
            blocks = _assigned([text for _, text in documents], tuple(part for part in _PARTS if part != _JUDGE))
            blocks += _assigned([text for _, text in judging], (_JUDGE,))
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
        pieces = []
        for piece in document.content.pieces():
            pieces.append(piece[:left])
            left -= len(piece)
            if left <= 0:
                break
        text = "".join(pieces)
        if text in seen:
            continue
        if len(text) >= _LEAST_SHARED:
            seen.add(text)
        yield document.source, text


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
