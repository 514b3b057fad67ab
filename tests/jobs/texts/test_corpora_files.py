"""Corpora from local files and folders: documents, counts and fingerprints."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headscan.cli.main import verb_class
from headscan.cli.option_parser import options_of
from headscan.errors import HeadscanError
from headscan.texts import BUILT_IN, CorpusError, CorpusSpec, TokenConfig, open_corpus
from tests.jobs.texts.corpus_reading import problems, read, texts, write_parquet


def test_a_quote_in_a_tsv_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('n\ttext\n1\t"Hello\n2\tfoo\n3\tbar" x\n4\tlast\n')
    documents = read(tmp_path / "a.tsv")
    assert texts(documents) == ['"Hello', "foo", 'bar" x', "last"] and not problems(documents)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of every kind, and some that are none."""
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_text("novel\n\nwith two paragraphs")
    (root / "b.PY").write_text("x = 1\n")
    (root / "c.jsonl").write_text('{"text": "line one"}\n{"text": "line two"}\n')
    (root / "d.json").write_text('[{"text": "from json"}]')
    write_parquet(root / "e.parquet", text=["from parquet", "second row"])
    (root / "f.csv").write_text('n,text\n1,"from csv, quoted"\n')
    (root / "g.tsv").write_text("n\ttext\n1\tfrom tsv, plain\n")
    (root / "deep" / "a.md").write_text("# deep")
    (root / "LICENSE").write_text("not read")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / ".hidden.txt").write_text("not read")
    (root / ".git").mkdir()
    (root / ".git" / "x.txt").write_text("not read")
    return root


EXPECTED = {
    "a.txt": "novel\n\nwith two paragraphs",
    "b.PY": "x = 1\n",
    "c.jsonl:1": "line one",
    "c.jsonl:2": "line two",
    "d.json:1": "from json",
    "deep/a.md": "# deep",
    "e.parquet:1": "from parquet",
    "e.parquet:2": "second row",
    "f.csv:1": "from csv, quoted",
    "g.tsv:1": "from tsv, plain",
}


def test_folder_reads_every_kind_in_order_of_name(folder):
    corpus = open_corpus(CorpusSpec(str(folder)))
    documents = list(corpus.documents())
    assert {d.source: d.text for d in documents} == EXPECTED
    assert [d.source for d in documents] == list(EXPECTED)
    assert [d.index for d in documents] == list(range(len(EXPECTED)))
    assert list(corpus.documents()) == documents, "a corpus can be read twice"


def test_folder_lists_what_it_skips_by_kind(folder):
    os.mkfifo(folder / "pipe.txt")
    (folder / "linked").symlink_to(folder / "deep")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    assert open_corpus(CorpusSpec(str(folder))).skipped == {
        ".png": ("image.png",),
        "hidden file": (".hidden.txt",),
        "hidden folder": (".git",),
        "linked folder": ("linked",),
        "no suffix": ("LICENSE",),
        "not a file": ("broken.txt", "pipe.txt"),
    }


def test_fingerprint_is_of_names_and_contents_not_of_the_place(folder, tmp_path):
    before = open_corpus(CorpusSpec(str(folder))).fingerprint()
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git"))
    assert open_corpus(CorpusSpec(str(copy))).fingerprint() == before
    assert open_corpus(CorpusSpec(str(copy), limit_documents=1)).fingerprint() != before
    assert open_corpus(CorpusSpec(str(copy), column="text")).fingerprint() != before
    (copy / "image.png").write_bytes(b"another picture")
    assert open_corpus(CorpusSpec(str(copy))).fingerprint() == before, "a file that is not read does not count"
    (copy / "b.PY").rename(copy / "b2.py")
    renamed = open_corpus(CorpusSpec(str(copy))).fingerprint()
    (copy / "a.txt").write_text("novel\n\nwith two paragraphz")
    assert len({before, renamed, open_corpus(CorpusSpec(str(copy))).fingerprint()}) == 3


def test_text_that_is_not_utf8_or_empty_is_a_problem(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffwith a mark".encode())
    (tmp_path / "b.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "c.txt").write_bytes("wide".encode("utf-16-le"))
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / "e.txt").write_text(" \n\t\n")
    documents = read(tmp_path)
    assert texts(documents) == ["with a mark", None, None, None, None]
    assert problems(documents) == [
        ("b.txt", "undecodable"),
        ("c.txt", "undecodable"),
        ("d.txt", "empty"),
        ("e.txt", "empty"),
    ]
    assert documents[1].detail == "not UTF-8 at byte 3"


def test_a_broken_line_is_named_and_the_rest_is_read(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "first", "id": 1}',
        b'{"text": "cut off',
        b"",
        b'{"text": "caf\xe9"}',
        b'{"id": 2}',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "  "}',
        b'{"text": "\\ud800"}',
        b'"a bare string"',
        b"[1]",
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    documents = read(tmp_path / "x.jsonl")
    assert [text for text in texts(documents) if text] == ["first", "a bare string", "last"]
    assert problems(documents) == [
        ("x.jsonl:2", "undecodable"),
        ("x.jsonl:4", "undecodable"),
        ("x.jsonl:5", "no_text"),
        ("x.jsonl:6", "no_text"),
        ("x.jsonl:7", "empty"),
        ("x.jsonl:8", "empty"),
        ("x.jsonl:9", "undecodable"),
        ("x.jsonl:11", "no_text"),
        ("x.jsonl:12", "undecodable"),
    ]
    assert documents[-1].source == "x.jsonl:13"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('["one", "two"]', [("x.json:1", "one"), ("x.json:2", "two")]),
        ('{"text": "the only one"}', [("x.json", "the only one")]),
        ('{"text": "a"}\n{"text": "b"}\n', [("x.json:1", "a"), ("x.json:2", "b")]),
    ],
)
def test_shapes_of_json(tmp_path, content, expected):
    (tmp_path / "x.json").write_text(content)
    assert [(d.source, d.text) for d in read(tmp_path / "x.json")] == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"name": "settings", "version": "1"}', "no_text"),
        ('[{"text": null, "n": 1}]', "empty"),
        ("{\n broken", "undecodable"),
        ("[]", "empty"),
        ("", "empty"),
    ],
)
def test_json_without_text_is_a_problem_not_an_error(tmp_path, content, problem):
    (tmp_path / "x.json").write_text(content)
    ((source, found),) = problems(read(tmp_path / "x.json"))
    assert source.removesuffix(":1") == "x.json"
    assert found == problem


def test_files_without_records_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "b.csv").write_text("text\n")
    (tmp_path / "c.csv").write_text("")
    write_parquet(tmp_path / "d.parquet", text=pa.array([], pa.string()))
    found = problems(read(tmp_path))
    assert found == [(name, "empty") for name in ("a.jsonl", "b.csv", "c.csv", "d.parquet")]


def test_cells_of_tables(tmp_path):
    (tmp_path / "x.csv").write_text('text,n\n"two\nlines",1\n,2\nNA,3\n')
    write_parquet(tmp_path / "y.parquet", text=["kept", None, " "])
    documents = read(tmp_path)
    assert texts(documents) == ["two\nlines", None, "NA", "kept", None, None]
    assert problems(documents) == [("x.csv:2", "empty"), ("y.parquet:2", "empty"), ("y.parquet:3", "empty")]


def test_damaged_tables_are_counted_and_the_rest_is_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\ncaf\xe9\n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing more")
    write_parquet(tmp_path / "c.parquet", text=["fine"])
    documents = read(tmp_path)
    assert problems(documents) == [("a.csv", "undecodable"), ("b.parquet", "undecodable")]
    assert texts(documents)[-1] == "fine"


def test_brackets_and_blanks_in_names_are_no_pattern(tmp_path):
    odd = tmp_path / "odd [name] *"
    odd.mkdir()
    write_parquet(odd / "a[1].parquet", text=["from a[1]"])
    write_parquet(odd / "a1.parquet", text=["from a1"])
    assert texts(read(odd / "a[1].parquet")) == ["from a[1]"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_choice_of_the_column(tmp_path, suffix):
    def write(*rows: dict) -> Path:
        path = tmp_path / f"x.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        elif suffix == "csv":
            path.write_text("\n".join([",".join(rows[0])] + [",".join(map(str, row.values())) for row in rows]))
        elif suffix == "json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        return path

    both = write({"title": "t", "text": "x", "n": 1})
    assert texts(read(both)) == ["x"]
    assert texts(read(both, column="title")) == ["t"]
    with pytest.raises(CorpusError, match=r"no column 'body'. Choose one of its columns: title, text, n"):
        read(both, column="body")
    with pytest.raises(CorpusError, match=r"'n' .*has no strings"):
        read(both, column="n")
    assert texts(read(write({"n": 1, "body": "only"}))) == ["only"]
    with pytest.raises(CorpusError, match=r"several string columns.*: title, body"):
        read(write({"title": "t", "body": "b"}))
    with pytest.raises(CorpusError, match="no string column"):
        read(write({"n": 1, "m": 2}))


def test_limit_counts_documents_with_text(tmp_path):
    for name, content in (("a", ""), ("b", "one"), ("c", ""), ("d", "two"), ("e", "three")):
        (tmp_path / f"{name}.txt").write_text(content)
    documents = read(tmp_path, limit_documents=2)
    assert texts(documents) == [None, "one", None, "two"]


def test_a_file_named_directly_is_read_with_any_suffix(tmp_path):
    (tmp_path / "NOTES").write_text("plain")
    assert texts(read(tmp_path / "NOTES")) == ["plain"]


def test_built_in_corpora():
    library = open_corpus(CorpusSpec("python-stdlib", limit_documents=30))
    held_out = open_corpus(CorpusSpec("python-stdlib-heldout"))
    documents = list(held_out.documents())
    assert "argparse.py" in [d.source for d in documents]
    assert all(d.problem is None for d in documents)
    assert "class ArgumentParser" in next(d.text for d in documents if d.source == "argparse.py")
    assert sum(d.problem is None for d in library.documents()) == 30
    assert held_out.fingerprint() == open_corpus(CorpusSpec("python-stdlib-heldout")).fingerprint()


def test_the_help_names_the_built_in_corpora():
    (corpus,) = (option for option in options_of(verb_class("scan")).values() if "--corpus" in option.flags)
    assert corpus.help.endswith(f"a built-in corpus: {', '.join(BUILT_IN)}")


@pytest.mark.parametrize("name", ["nowhere.txt", "./nowhere", "a/b/c", "/no/such/folder", "x" * 5000 + "/", "nul\0"])
def test_missing_path_is_an_error_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CorpusError) as caught:
        open_corpus(CorpusSpec(name))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, HeadscanError)


def test_folder_without_known_files(tmp_path):
    with pytest.raises(CorpusError, match="no files"):
        open_corpus(CorpusSpec(str(tmp_path)))
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(CorpusError, match=r"1 \.png"):
        open_corpus(CorpusSpec(str(tmp_path)))


def test_folder_of_save_to_disk_names_the_fix(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CorpusError, match="to_parquet"):
        open_corpus(CorpusSpec(str(tmp_path)))


@pytest.mark.parametrize("option", [{"config": "en"}, {"split": "test"}, {"revision": "main"}, {"column": "text"}])
def test_local_text_refuses_the_options_of_data_sets(tmp_path, option):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match=f"has no {next(iter(option))}"):
        read(tmp_path, **option)


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl", "a.csv", "a.parquet"])
def test_unreadable_file_is_an_error(tmp_path, name, monkeypatch):
    (tmp_path / name).write_text("x")

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")  # in place of chmod, which does not bind root

    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    monkeypatch.setattr(Path, "open", refuse)
    for use in (corpus.fingerprint, lambda: list(corpus.documents())):
        with pytest.raises(CorpusError, match=f"cannot read .*{name}: Permission denied"):
            use()


def test_vanished_file_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    corpus = open_corpus(CorpusSpec(str(tmp_path)))
    (tmp_path / "a.txt").unlink()
    for use in (corpus.fingerprint, lambda: list(corpus.documents())):
        with pytest.raises(CorpusError, match=r"cannot read .*a\.txt"):
            use()


@pytest.mark.parametrize("fields", [{"name": " "}, {"name": "x", "split": ""}, {"name": "x", "limit_documents": 0}])
def test_spec_is_validated(fields):
    with pytest.raises(CorpusError, match=r"Give|Raise"):
        CorpusSpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": 8, "mode": "fold"},
        {"max_tokens": 8, "bos": "sometimes"},
        {"max_tokens": 8, "min_tokens": 0},
        {"max_tokens": 8, "limit_sequences": 0},
    ],
)
def test_plan_is_validated(fields):
    with pytest.raises(CorpusError, match=r"Give|Choose|Raise"):
        TokenConfig(**fields)


def test_import_loads_no_heavy_library():
    heavy = {"torch", "datasets", "transformers", "pandas", "pyarrow"}
    code = f"import sys, headscan.texts; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_json_value_too_large_to_parse_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("headscan.texts.files._JSON_BYTES", 1000)
    long = json.dumps({"text": "x" * 5000})
    (tmp_path / "a.jsonl").write_text(f'{{"text": "first"}}\n{long}\n{{"text": "last"}}\n')
    (tmp_path / "b.json").write_text(json.dumps([{"text": "x" * 2000}]))
    (tmp_path / "c.json").write_text('{"text": "a line"}\n' * 100)
    documents = read(tmp_path)
    assert problems(documents) == [("a.jsonl:2", "undecodable"), ("b.json", "undecodable")]
    assert "JSON in one value. Write it as JSON Lines" in documents[1].detail
    assert texts(documents) == ["first", None, "last", None, *["a line"] * 100]


def test_line_ends_of_windows_are_line_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends between carriage return and line feed."""
    from headscan.texts import documents

    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\nfour\r")
    for size in range(1, 22):
        monkeypatch.setattr(documents, "PIECE_BYTES", size)
        assert "".join(documents.decoded(tmp_path / "a.txt")) == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_files_with_a_byte_order_mark_are_read(tmp_path: Path, encoding: str) -> None:
    lines = ["ada café one", "bo naïve two"]
    objects = [{"text": line} for line in lines]
    files = {
        "a.txt": "\n".join(lines),
        "b.jsonl": "\n".join(json.dumps(each, ensure_ascii=False) for each in objects),
        "c.json": json.dumps(objects, ensure_ascii=False),
        "d.json": "\n".join(json.dumps(each, ensure_ascii=False) for each in objects),
        "e.csv": "\n".join(["text,n", *(f"{line},1" for line in lines)]),
        "f.tsv": "\n".join(["text\tn", *(f"{line}\t1" for line in lines)]),
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode(encoding))
    documents = read(tmp_path)
    assert texts(documents) == ["\n".join(lines), *lines * 5] and not problems(documents)


def test_a_line_that_breaks_the_encoding_of_the_mark_ends_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "one"}\n{"text": "two"}'.encode("utf-16")[:-1])
    documents = read(tmp_path / "a.jsonl")
    assert documents[0].text is None or documents[0].text == "one"
    assert problems(documents)[-1][1] == "undecodable" and "damaged after line" in documents[-1].detail


BYTES = [b"ada counts", "bo café".encode(), b"\xff\xd8 a picture", None]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_of_a_parquet_column_are_text_if_nothing_else_is(tmp_path: Path, kind: pa.DataType) -> None:
    bytes_, words = pa.array(BYTES, kind), list("abcd")
    for name, columns in (("only", {"content": bytes_}), ("named", {"text": bytes_, "title": words})):
        documents = read(write_parquet(tmp_path / f"{name}.parquet", **columns))
        assert texts(documents) == ["ada counts", "bo café", None, None]
        assert [kind for _, kind in problems(documents)] == ["undecodable", "empty"]
        assert documents[2].detail.endswith("is not UTF-8 at byte 0")
    image = write_parquet(tmp_path / "image.parquet", image=bytes_, caption=words)
    assert texts(read(image)) == words
    assert texts(read(image, column="image"))[:2] == ["ada counts", "bo café"]
    two = write_parquet(tmp_path / "two.parquet", a=bytes_, b=bytes_)
    with pytest.raises(
        CorpusError, match=r"several string columns and none named 'text'. Choose one of its columns: a, b"
    ):
        read(two)
