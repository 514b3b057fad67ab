"""Hub data sets, without a network: the loader is replaced by one that reads a local folder of the same shape."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headscan.texts import CorpusError, CorpusSpec, open_corpus

README = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.parquet}
  - {split: test, path: en/test.parquet}
- config_name: de
  data_files:
  - {split: train, path: de/train.parquet}
---
"""


@pytest.fixture(autouse=True)
def answering(monkeypatch) -> None:
    """The hub counts as one that answers, for the loader is replaced."""
    monkeypatch.setattr("headscan.texts.data_sets.hub_answers", lambda: True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> list[dict]:
    """A hub with the one data set ``someone/books``; returns the calls of the loader."""
    root = tmp_path / "books"
    for name, rows in {
        "en/train": ["call me", None, " ", "ishmael"],
        "en/test": ["held out"],
        "de/train": ["nennt mich"],
    }.items():
        path = root / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": range(len(rows)), "body": rows, "tags": [["a"]] * len(rows)})
        pq.write_table(table, path)
    (root / "README.md").write_text(README)
    load = datasets.load_dataset
    calls: list[dict] = []

    def load_dataset(path, name=None, **options):
        calls.append({"path": path, "name": name, **options})
        if path != "someone/books":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub\nor is private.")
        return load(str(root), name, **{**options, "revision": None})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    return calls


def spec(**fields) -> CorpusSpec:
    return CorpusSpec(**{"name": "someone/books", "config": "en", **fields})


def test_documents_are_streamed_from_the_config_and_split(hub):
    documents = list(open_corpus(spec(revision="abc")).documents())
    assert [(d.source, d.text, d.problem) for d in documents] == [
        ("someone/books/en/train:1", "call me", None),
        ("someone/books/en/train:2", None, "empty"),
        ("someone/books/en/train:3", None, "empty"),
        ("someone/books/en/train:4", "ishmael", None),
    ]
    assert hub[0] == {"path": "someone/books", "name": "en", "split": "train", "revision": "abc", "streaming": True}
    assert [d.text for d in open_corpus(spec(split="test")).documents()] == ["held out"]
    assert [d.text for d in open_corpus(spec(config="de")).documents()] == ["nennt mich"]
    assert [d.text for d in open_corpus(spec(limit_documents=1)).documents()] == ["call me"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": "fr"}, r"'fr' not found. Available: \['en', 'de'\]"),
        ({"config": None}, r"Config name is missing.*'en', 'de'"),
        ({"split": "validation"}, r"Bad split: validation. Available splits: .*test"),
    ],
)
def test_unknown_config_and_split_list_the_choices(hub, fields, message):
    with pytest.raises(CorpusError, match=message) as caught:
        open_corpus(spec(**fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("column", "message"), [("text", "no column 'text'"), ("tags", "'tags' .*has no strings")])
def test_unknown_column_lists_the_columns(hub, column, message):
    with pytest.raises(CorpusError, match=f"{message}.*id, body, tags"):
        list(open_corpus(spec(column=column)).documents())


def test_missing_corpus_error_names_the_attempts(hub):
    with pytest.raises(CorpusError) as caught:
        open_corpus(CorpusSpec("someone/else"))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'someone/else'", "not built in", "no file or folder", "doesn't exist on the Hub", "offline"):
        assert part in message


def test_a_path_takes_precedence_over_the_hub(hub, tmp_path):
    (tmp_path / "someone" / "books").mkdir(parents=True)
    (tmp_path / "someone" / "books" / "a.txt").write_text("local")
    assert [d.text for d in open_corpus(CorpusSpec("someone/books")).documents()] == ["local"]
    assert hub == []


def test_fingerprint_depends_on_the_requested_data(hub):
    variants = [spec(), spec(config="de"), spec(split="test"), spec(column="body"), spec(revision="abc")]
    prints = [open_corpus(variant).fingerprint() for variant in variants]
    assert len(set(prints)) == len(prints)
    assert open_corpus(spec()).fingerprint() == prints[0]


def test_a_stream_without_declared_columns(monkeypatch):
    rows = [{"n": 1, "body": "one"}, {"n": 2, "body": 2}, {"n": 3, "body": "three"}]
    data = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert data.features is None
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: data)
    documents = list(open_corpus(CorpusSpec("someone/odd")).documents())
    assert [(d.text, d.problem) for d in documents] == [("one", None), (None, "no_text"), ("three", None)]


def test_columns_that_are_not_read_are_not_decoded(monkeypatch):
    features = datasets.Features({"body": datasets.Value("string"), "picture": datasets.Image()})
    rows = [{"body": "one", "picture": {"bytes": b"no picture", "path": None}}]
    data = datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)
    with pytest.raises((ImportError, OSError)):
        next(iter(data))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: data)
    assert [d.text for d in open_corpus(CorpusSpec("someone/odd")).documents()] == ["one"]


def test_a_stream_that_breaks_off_is_an_error_not_an_end(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise TimeoutError("the network\nis gone")

    data = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: data)
    documents = open_corpus(CorpusSpec("someone/odd")).documents()
    assert next(documents).text == "one"
    with pytest.raises(CorpusError, match="failed after row 1: the network is gone"):
        next(documents)
