"""Texts that a limit draws come from all files, by a hash of their text."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from headscan.texts import Corpus, CorpusError, CorpusReport, CorpusSpec, TokenConfig, open_corpus, sequences
from headscan.texts.corpus import GivenTexts, HubCorpus
from headscan.texts.drawing import BLOCK, Draw, blocks
from headscan.texts.sequences import TokenSequence, read_spread
from tests.jobs.texts.corpus_reading import write_parquet
from tests.jobs.texts.test_corpora_sequences import make_tokenizer

#: Characters of four books; the bytes are the tokens.
BOOKS = (20_000, 160_000, 100_000, 420_000)
MODES = ("truncate", "chunk", "pack")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(None)


def prose(seed: int, characters: int, *, line: int = 70) -> str:
    """Return text of random words, in lines of about ``line`` characters."""
    draw, lines, length = random.Random(seed), list[str](), 0
    while length < characters:
        words = [draw.choice("alpha beta gamma delta zeta eta theta iota kappa mu".split())]
        while sum(map(len, words)) + len(words) < line:
            words.append(f"{draw.choice('abcdefgh')}{draw.randrange(10_000)}")
        lines.append(" ".join(words))
        length += len(lines[-1]) + 1
    return "\n".join(lines)[:characters]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    for number, size in enumerate(BOOKS):
        (folder / f"{number}.txt").write_text(prose(number, size))
    return folder


def drawn(corpus: Corpus, tokenizer: Any, limit: int, **options: Any) -> tuple[list[TokenSequence], CorpusReport]:
    report = CorpusReport()
    config = TokenConfig(**{"max_tokens": 500, "mode": "chunk", "limit_sequences": limit} | options)
    return list(sequences(corpus, tokenizer, config, report)), report


def hashes(found: list[TokenSequence]) -> set[str]:
    return {each.content_hash for each in found}


def test_texts_come_from_all_files_in_proportion_to_their_text(books: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = read_spread(CorpusSpec(str(books)), tokenizer, 512, 24, shortest=16)
    by_file = Counter(each.source for each in found)
    assert len(found) == 24 and set(map(len, found)) == {512}
    for number, size in enumerate(BOOKS):
        assert by_file[f"{number}.txt"] == pytest.approx(24 * size / sum(BOOKS), abs=4) and by_file[f"{number}.txt"]
    # One text of a block, from a place in the block that a hash decides.
    assert len({(each.source, each.block) for each in found}) == 24
    whole = {number: (books / f"{number}.txt").read_bytes() for number in range(4)}
    letters = tokenizer.decode
    at = [whole[int(each.source[0])].index(letters(each.ids.tolist()).encode()) % BLOCK for each in found]
    assert sum(place < BLOCK / 4 for place in at) < 12 and sum(place > 3 * BLOCK / 4 for place in at) > 2


@pytest.mark.parametrize("mode", MODES)
def test_fewer_texts_than_files_are_of_as_many_files(tmp_path: Path, mode: str, tokenizer: Any) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(prose(number, 500 * (1 + number % 7)))
    found, report = drawn(open_corpus(CorpusSpec(str(tmp_path))), tokenizer, 8, max_tokens=50, mode=mode)
    sources = [each.source for each in found]
    # A pack is a part of a block, or the end of one and the beginning of another.
    assert len(found) == 8 and len(set(sources)) == (3 if mode == "pack" else 8) and max(sources) > "20.txt"
    assert sources == sorted(sources) and [each.index for each in found] == list(range(8))
    files = len(set(sources))
    assert report.total() == (
        f"8 sequences, 400 tokens, drawn from {files} of 40 documents in {files} of 40 files by a hash of the text"
    )
    assert report.lines()[0] == report.total()


@pytest.mark.parametrize("mode", MODES)
def test_a_larger_limit_contains_a_smaller_one(books: Path, mode: str, tokenizer: Any) -> None:
    corpus = open_corpus(CorpusSpec(str(books)))
    before: set[str] = set()
    for limit in (1, 3, 4, 20, 90):
        found, _ = drawn(corpus, tokenizer, limit, mode=mode)
        assert len(found) == (limit if mode != "truncate" else min(limit, 4)) and before <= hashes(found)
        before = hashes(found)


def test_neither_names_nor_order_matter(books: Path, tmp_path: Path, tokenizer: Any) -> None:
    for number in range(4):
        shutil.copy(books / f"{number}.txt", tmp_path / f"{(number * 3 + 1) % 4} renamed.txt")
    one, again, other = (
        drawn(open_corpus(CorpusSpec(str(each))), tokenizer, 30)[0] for each in (books, books, tmp_path)
    )
    assert hashes(one) == hashes(other)
    assert [each.ids.tolist() for each in one] == [each.ids.tolist() for each in again]
    # A further file replaces some texts, and moves none.
    (tmp_path / "a.txt").write_text(prose(9, 300_000))
    more, _ = drawn(open_corpus(CorpusSpec(str(tmp_path))), tokenizer, 30)
    added = {each.content_hash for each in more if each.source == "a.txt"}
    assert added and hashes(more) - added < hashes(one)


def test_a_limit_above_all_reads_all(tmp_path: Path, tokenizer: Any) -> None:
    """Documents of one block give the same sequences as without a limit, copies included."""
    texts = ["", "one line", prose(1, 1_730), prose(2, 1_000), prose(1, 1_730), "  \n", prose(3, 30)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    for mode in ("truncate", "chunk"):
        options: dict[str, Any] = {"mode": mode, "min_tokens": 20, "max_tokens": 500}
        report = CorpusReport()
        every = list(sequences(corpus, tokenizer, TokenConfig(**options), report))
        found, drawn_report = drawn(corpus, tokenizer, 100, **options)
        assert [(each.index, each.source, each.ids.tolist()) for each in found] == [
            (each.index, each.source, each.ids.tolist()) for each in every
        ]
        assert drawn_report.drawn is None and drawn_report.as_dict() == report.as_dict()
    assert drawn(corpus, tokenizer, 3, mode="chunk", min_tokens=20)[1].empty == 2


def test_copies_come_last(tmp_path: Path, tokenizer: Any) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(prose(min(number, 3), 400))
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    for limit, different in ((4, 4), (6, 4), (9, 4)):
        found, _ = drawn(corpus, tokenizer, limit)
        assert (len(found), len(hashes(found))) == (limit, different)


def test_short_texts_are_replaced_by_others(tmp_path: Path, tokenizer: Any) -> None:
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(1_000):
            text = prose(number, 600 if number % 20 == 7 else 20)
            file.write(json.dumps({"text": text}) + "\n")
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    found, _ = drawn(corpus, tokenizer, 40, min_tokens=100)
    assert len(hashes(found)) == 40 and {len(each) for each in found} <= {500, 100}
    assert len({each.document for each in found}) == 40
    assert hashes(drawn(corpus, tokenizer, 10, min_tokens=100)[0]) < hashes(found)
    # All of these documents have two pieces; a hundred texts need the second ones.
    assert len(drawn(corpus, tokenizer, 100, min_tokens=100)[0]) == 100
    with pytest.raises(CorpusError, match="gave no sequence: pieces too short: 1,0"):
        drawn(corpus, tokenizer, 4, min_tokens=700, max_tokens=700)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "one file", "one line", "stream", "given"])
def test_one_source_gives_texts_of_its_end(tmp_path: Path, kind: str, tokenizer: Any) -> None:
    rows = [prose(number, 700) for number in range(400)]
    path = tmp_path / "corpus.txt"
    corpus: Corpus | None = None
    if kind == "jsonl":
        path = tmp_path / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    elif kind == "parquet":
        path = write_parquet(tmp_path / "corpus.parquet", text=rows)
    elif kind == "one file":
        path.write_text("\n".join(rows * 6))
    elif kind == "one line":
        path.write_text(" ".join(rows).replace("\n", " "))
    elif kind == "stream":
        data = Dataset.from_dict({"text": rows}).to_iterable_dataset()
        corpus = HubCorpus(CorpusSpec("owner/name"), "hub data set", data)
    else:
        corpus = GivenTexts(rows)
    found, _ = drawn(corpus or open_corpus(CorpusSpec(str(path))), tokenizer, 12)
    text = "\n".join(rows).replace("\n", " ")
    places = sorted(text.index(tokenizer.decode(each.ids.tolist()).replace("\n", " ")[50:]) for each in found)
    assert places[0] < len(text) / 3 and places[-1] > 2 * len(text) / 3 and len(places) == 12


def test_files_of_a_corpus_that_is_too_large_are_read_up_to_their_share(
    books: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setattr(Corpus, "most_characters", 200_000)
    monkeypatch.setattr("headscan.texts.drawing._LEAST_OF_FILE", 1_000)
    corpus = open_corpus(CorpusSpec(str(books)))
    lengths = Draw(corpus).lengths
    assert len(lengths) == 1 + 3 + 3 + 3
    # More texts than the shares have raise them.
    assert len(Draw(corpus, wanted=400_000).lengths) == 1 + 6 + 5 + 6
    assert len(drawn(corpus, tokenizer, 60)[0]) == 60


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    for change in (prose(5, 50_000), prose(1, 30_000), ""):
        path = tmp_path / "a.txt"
        path.write_text(prose(1, 90_000))
        draw = Draw(open_corpus(CorpusSpec(str(tmp_path))))
        path.write_text(change)
        with pytest.raises(CorpusError, match=r"changed while it was read\. Run"):
            list(draw.blocks(0, len(draw)))


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(5)) if text else []
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("make", [lambda n: prose(n, n), lambda n: prose(n, n).replace("\n", " "), lambda n: "x" * n])
def test_blocks_are_the_text_whatever_its_pieces(make: Callable[[int], str]) -> None:
    draw = random.Random(0)
    for length in (0, 1, 99, 100, 101, 149, 150, 151, 199, 200, 1_000, 3_333):
        text = make(length)
        found = list(blocks([text], 100))
        assert "".join(found) == text and all(len(block) < 150 for block in found)
        assert all(len(block) >= 50 for block in found) or length < 50
        assert all(block[-1] in "\n " for block in found[:-1]) or "x" in text[:2]
        for _ in range(20):
            assert list(blocks(pieces_of(text, draw), 100)) == found
