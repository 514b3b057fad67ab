"""The parts of a study's texts: which measure, choose and judge, and what they share."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from headscan.store.output_files import write_text
from headscan.study.study_step import StudyError
from headscan.study.study_texts import _PARTS, document_of, split_texts
from headscan.texts import CorpusSpec
from headscan.texts.continuation_task import write_task


def test_equal_documents_go_to_one_part(tmp_path: Path) -> None:
    for number in range(60):
        text = f"file {number % 30} has a text of its own\n" * 100
        (tmp_path / f"{number}.txt").write_text(text)
    split_texts(CorpusSpec(str(tmp_path)), tmp_path / "parts")
    files = [file.read_text() for file in (tmp_path / "parts").glob("*/*.txt")]
    assert len(files) == len(set(files)) == 30


@pytest.mark.parametrize("documents", [1, 3, 40])
def test_parts_share_no_text(tmp_path: Path, documents: int) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(documents):
        lines = [f"line {number} {line} of a text that is long enough\n" for line in range(40_000 // documents)]
        (folder / f"{number}.txt").write_text("".join(lines))
    texts = split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    seen: dict[str, set[str]] = {}
    for part in ("measure", "choose", "judge"):
        files = sorted((tmp_path / "parts" / part).glob("*.txt"))
        seen[part] = {line for file in files for line in file.read_text().splitlines()}
        assert len(seen[part]) > 0.1 * 40_000
    assert not (seen["measure"] & seen["judge"] or seen["choose"] & seen["judge"] or seen["measure"] & seen["choose"])
    assert len(set.union(*seen.values())) >= 0.99 * (40_000 // documents) * documents
    assert split_texts(CorpusSpec(str(folder)), tmp_path / "parts") == texts


def test_a_short_corpus_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"{number} is too short\n" * 50)
    (tmp_path / "2.txt").write_text(" \n" * 50)
    message = r"too short for 3 parts of a study: documents with text: 2 \(limit 3, or one of 5,000 characters\)"
    with pytest.raises(StudyError, match=message):
        split_texts(CorpusSpec(str(tmp_path)), tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("long", [0, 260_000])
def test_a_few_short_documents_lose_no_text(tmp_path: Path, long: int) -> None:
    """They go whole to a part, next to one that is long enough to be cut."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = [f"document {number} has this line\n" * 160 for number in range(19)]
    documents[3] = "".join(f"line {line}\n" for line in range(long // 10)) or documents[3]
    for number, text in enumerate(documents):
        (folder / f"{number:02}.txt").write_text(text)
    split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    files = {part: sorted((tmp_path / "parts" / part).iterdir()) for part in ("measure", "choose", "judge")}
    sizes = {part: sum(len(file.read_text()) for file in of_part) for part, of_part in files.items()}
    whole = sum(map(len, documents))
    assert sum(sizes.values()) == whole
    for part, share in (("measure", 0.4), ("choose", 0.2), ("judge", 0.4)):
        assert abs(sizes[part] / whole - share) < 0.06, (part, sizes)
    # A block of a part counts as a document, so it is no shorter than half of 20,000 characters.
    assert len(files["judge"]) == (8 if not long else 12)


def test_an_interrupted_split_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number} has this line\n" * 100)
    written: list[Path] = []

    def stopped(path: Path, text: str) -> None:
        if len(written) == 30:
            raise KeyboardInterrupt
        write_text(path, text)
        written.append(path)

    corpus, parts = CorpusSpec(str(folder)), tmp_path / "parts"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("headscan.study.study_texts.write_text", stopped)
        split_texts(corpus, parts)
    for number in range(0, 40, 2):
        (folder / f"{number:02}.txt").unlink()
    split_texts(corpus, parts)
    files = [file.read_text() for file in parts.glob("*/*.txt")]
    assert len(files) == len(set(files)) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "texts"]


def test_questions_of_blocks_name_the_document_that_these_are_cut_from(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two", "three"):
        lines = (" ".join(map(str, rng.integers(0, 10_000, 12))) for _ in range(3_000))
        (folder / f"{name}.txt").write_text("\n".join(lines))
    files = split_texts(CorpusSpec(str(folder)), tmp_path / "parts").judged_files
    assert len(files) > 3 and {document_of(file) for file in files} == {"0", "1", "2"}
    assert document_of("book.txt") == "book.txt"
    write_task(tmp_path / "task", files, 30, name="asked", document_of=document_of)
    rows = [json.loads(line) for line in (tmp_path / "task" / "asked.jsonl").read_text().splitlines()]
    assert {row["document"] for row in rows} == {"0", "1", "2"} and len({row["module"] for row in rows}) > 3


def test_a_corpus_that_changed_is_no_longer_the_study_s(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"document {number} has this line\n" * 100)
    corpus = CorpusSpec(str(folder))
    texts = split_texts(corpus, tmp_path / "parts")
    assert split_texts(corpus, tmp_path / "parts") == texts
    (folder / "20.txt").write_text("one document more\n" * 100)
    with pytest.raises(StudyError, match=r"`corpus` or `judge` changed\. Restore them, or choose another folder"):
        split_texts(corpus, tmp_path / "parts")


def test_texts_that_judge_are_not_those_that_measure(tmp_path: Path) -> None:
    for folder, first in (("measure", 0), ("judge", 29), ("others", 30)):
        (tmp_path / folder).mkdir()
        for number in range(first, first + 30):
            text = f"file {number} has a text of its own\n" * 100
            (tmp_path / folder / f"{number} of {folder}.txt").write_text(text)
        (tmp_path / folder / "heading.txt").write_text("Notes\n")
    corpus, judge, others = (CorpusSpec(str(tmp_path / name)) for name in ("measure", "judge", "others"))
    message = r"1 of 31 documents of `judge` .*: 29 of judge\.txt has 100 % of its runs .*\(limit 5 %\)\. Remove"
    with pytest.raises(StudyError, match=message):
        split_texts(corpus, tmp_path / "parts", judge)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(StudyError, match="30 of 31 documents"):
        split_texts(corpus, tmp_path / "parts", corpus)
    assert len(split_texts(corpus, tmp_path / "parts", others).judged_files) == 31


def words(seed: int, lines: int) -> str:
    """Return lines of random words."""
    draw = random.Random(seed)
    return "".join(" ".join(f"word{draw.randrange(5_000)}" for _ in range(12)) + "\n" for _ in range(lines))


def corpus_of(folder: Path, texts: list[str]) -> CorpusSpec:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return CorpusSpec(str(folder))


def runs_of(text: str) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+|[^\w\s]", text)
    return {tuple(found[at : at + 20]) for at in range(len(found) - 19)}


def largest_share(parts: Path) -> float:
    """Return the largest share of the runs of a file that are in another part, as a set of tuples counts them."""
    runs = {part: [runs_of(file.read_text()) for file in (parts / part).iterdir()] for part in _PARTS}
    measured, chosen = (set().union(*runs[part]) for part in ("measure", "choose"))
    shares = [len(each & (measured | chosen)) / max(1, len(each)) for each in runs["judge"]]
    return max(shares + [len(each & measured) / max(1, len(each)) for each in runs["choose"]])


@pytest.mark.parametrize("documents", [6, 40])
@pytest.mark.parametrize("kind", ["line break", "added line", "joined", "half"])
def test_near_copies_go_to_one_part(tmp_path: Path, documents: int, kind: str) -> None:
    texts = [words(number, 1_200 if documents < 20 else 120) for number in range(documents)]
    lines = texts[0].splitlines(keepends=True)
    copies = {
        "line break": ["".join([*lines[:at], "\n", *lines[at:]]) for at in range(4)],
        "added line": [f"a line of its own, number {number}\n{texts[0]}" for number in range(4)],
        "joined": ["".join(texts[:2])],
        "half": ["".join(lines[: len(lines) // 2]) + words(99 + n, len(lines) // 2) for n in range(4)],
    }[kind]
    said: list[str] = []
    split_texts(corpus_of(tmp_path / "texts", texts + copies), tmp_path / "parts", say=said.append)
    assert largest_share(tmp_path / "parts") <= 0.05
    found = re.fullmatch(
        r"texts that judge share at most (\S+) % of their runs of 20 words with the other parts \(limit 5 %\)"
        r"(; blocks that shared more and measure instead: \d+ of \d+)?(; copies of blocks that are left out: \d+)?",
        said[0],
    )
    assert found is not None and (found[2] or found[3])
    # No copy counts as another text.
    for part in _PARTS:
        of_part = [runs_of(file.read_text()) for file in (tmp_path / "parts" / part).iterdir()]
        assert all(len(one & other) < 0.6 * len(one) for one in of_part for other in of_part if one is not other)
    # What is not copied stays in its part.
    sizes = {part: sum(len(file.read_text()) for file in (tmp_path / "parts" / part).iterdir()) for part in _PARTS}
    assert sizes["judge"] > 0.15 * sum(sizes.values())


@pytest.mark.parametrize("kind", ["added line", "joined", "chapter"])
def test_texts_that_judge_are_no_near_copies_of_the_corpus(tmp_path: Path, kind: str) -> None:
    texts = [words(number, 150) for number in range(24)]
    judging = {
        "added line": [f"another heading\n{text}" for text in texts],
        "joined": ["\n\n".join(texts)],
        # Two percent of the text, and most of one block.
        "chapter": [words(50, 4_000) + texts[3] + words(51, 4_000)],
    }[kind]
    corpus, judge = corpus_of(tmp_path / "texts", texts), corpus_of(tmp_path / "judge", judging)
    message = rf"{len(judging)} of {len(judging)} documents of `judge` .* has [\d.]+ % of its runs of 20 words there"
    with pytest.raises(StudyError, match=message):
        split_texts(corpus, tmp_path / "parts", judge)
    others = corpus_of(tmp_path / "others", [words(100 + number, 150) for number in range(24)])
    said: list[str] = []
    split_texts(corpus, tmp_path / "parts", others, say=said.append)
    assert said == ["texts that judge share at most 0 % of their runs of 20 words with the other parts (limit 5 %)"]


def test_a_licence_in_every_document_is_no_copy(tmp_path: Path) -> None:
    licence = words(1_000, 20)
    texts = [licence + words(number, 120) for number in range(40)]
    said: list[str] = []
    split_texts(corpus_of(tmp_path / "texts", texts), tmp_path / "parts", say=said.append)
    assert " 0 % " in said[0] and "measure instead" not in said[0]
    # Copies in more than half of the documents are no licence.
    copied = [f"{number}\n{texts[0]}" for number in range(30)] + texts[1:20]
    split_texts(corpus_of(tmp_path / "copies", copied), tmp_path / "others", say=said.append)
    assert "blocks that shared more and measure instead" in said[1]
    with pytest.raises(StudyError, match=r"every block .* that would choose shares more than 5 % of its runs"):
        split_texts(corpus_of(tmp_path / "all", copied[:30]), tmp_path / "none")


def test_parts_do_not_depend_on_names(tmp_path: Path) -> None:
    texts = [words(number, 120) for number in range(30)]
    found = []
    for name, order in (("one", texts), ("other", texts[::-1])):
        split_texts(corpus_of(tmp_path / name, order), tmp_path / f"{name} parts")
        files = {part: (tmp_path / f"{name} parts" / part).iterdir() for part in _PARTS}
        found.append({part: {file.read_text() for file in of_part} for part, of_part in files.items()})
    assert found[0] == found[1] and [len(found[0][part]) for part in _PARTS] == [12, 6, 12]


def test_a_large_corpus_is_read_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.study.study_texts._MOST", 200_000)
    corpus = corpus_of(tmp_path / "texts", [words(number, 1_000) for number in range(6)])
    split_texts(corpus, tmp_path / "parts")
    blocks = [file.read_text() for part in _PARTS for file in (tmp_path / "parts" / part).iterdir()]
    assert 180_000 < sum(map(len, blocks)) < 240_000
    for number in range(6):
        text = (tmp_path / "texts" / f"{number:03}.txt").read_text()
        assert any(block[:200] in text for block in blocks), number


def test_equal_documents_use_up_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.study.study_texts._MOST", 60_000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        name = max(9, number)  # ten equal documents, and two others
        (folder / f"{number:02}.txt").write_text("".join(f"{name} has line {line}\n" for line in range(1_000)))
    split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    files = [file for part in ("measure", "choose", "judge") for file in (tmp_path / "parts" / part).iterdir()]
    assert {line.split()[0] for file in files for line in file.read_text().splitlines()} == {"9", "10", "11"}
