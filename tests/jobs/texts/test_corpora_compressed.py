"""Compressed corpora: read as if they were not compressed; damaged archives are errors."""

import gzip

import pyarrow as pa
import pytest

from headscan.texts import CorpusError, CorpusSpec, open_corpus
from tests.jobs.texts.corpus_reading import problems, read, texts

COMPRESS = {"gz": gzip.compress, "zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True)}


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_text_and_json_are_read_as_if_they_were_not(tmp_path, kind):
    compress = COMPRESS[kind]
    (tmp_path / f"a.txt.{kind}").write_bytes(compress("\ufeffcafé".encode()))
    (tmp_path / f"b.jsonl.{kind}").write_bytes(compress(b'{"text": "one"}\n\nbroken\n{"text": "two"}'))
    (tmp_path / f"c.json.{kind.upper()}").write_bytes(compress(b'["three"]'))
    (tmp_path / f"d.csv.{kind}").write_bytes(compress(b"text\nnot read"))
    (tmp_path / f"e.{kind}").write_bytes(compress(b"no suffix before that of the compression"))
    (tmp_path / f"f.txt.{kind}").write_bytes(compress(b""))
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    documents = list(corpus.documents())
    assert [(d.source, d.text) for d in documents if not d.problem] == [
        (f"a.txt.{kind}", "café"),
        (f"b.jsonl.{kind}:1", "one"),
        (f"b.jsonl.{kind}:4", "two"),
        (f"c.json.{kind.upper()}:1", "three"),
    ]
    assert problems(documents) == [(f"b.jsonl.{kind}:3", "undecodable"), (f"f.txt.{kind}", "empty")]
    assert corpus.skipped == {f".csv.{kind}": (f"d.csv.{kind}",), f".{kind}": (f"e.{kind}",)}
    assert texts(read(tmp_path / f"e.{kind}")) == ["no suffix before that of the compression"]
    with pytest.raises(CorpusError, match=r"compressed table.*Decompress it"):
        open_corpus(CorpusSpec(str(tmp_path / f"d.csv.{kind}")))
    with pytest.raises(CorpusError, match="Check the path"):
        open_corpus(CorpusSpec(f"missing.txt.{kind}"))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json"])
@pytest.mark.parametrize("kind", COMPRESS)
def test_damaged_archives_are_errors_that_name_the_file(tmp_path, kind, name):
    content = b"".join(b'{"text": "line %d of some"}\n' % i for i in range(40_000))
    whole = COMPRESS[kind](content)
    path = tmp_path / f"{name}.{kind}"
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:5], b"plain text after all" * 10):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=rf"{name}.{kind} is damaged or incomplete: .*download it again"):
            read(path)


def test_archives_of_several_parts_are_read_to_their_end(tmp_path):
    for kind, compress in COMPRESS.items():
        path = tmp_path / f"x.jsonl.{kind}"
        path.write_bytes(compress(b'"one"\n') + compress(b'"two"\n'))
        assert texts(read(path)) == ["one", "two"]
