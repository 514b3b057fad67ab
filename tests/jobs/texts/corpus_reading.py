"""Helpers that read a corpus and select the compared fields."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headscan.texts import CorpusSpec, Document, open_corpus


def read(path: Path, **options) -> list[Document]:
    return list(open_corpus(CorpusSpec(str(path), **options)).documents())


def texts(documents: list[Document]) -> list[str | None]:
    return [document.text for document in documents]


def problems(documents: list[Document]) -> list[tuple[str, str]]:
    return [(document.source, document.problem) for document in documents if document.problem]


def write_parquet(path: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path
