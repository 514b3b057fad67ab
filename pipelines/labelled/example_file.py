"""Reading of labelled examples: text and label, or source and target, from a TSV or JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headscan.errors import HeadscanError

#: Names of the two columns in headers and JSON objects; the first that exists is read.
TEXT_COLUMNS = ("text", "sentence", "source")
LABEL_COLUMNS = ("label", "target")
_FORMATS = (".tsv", ".jsonl")


class ExampleError(HeadscanError):
    """A file of labelled examples cannot be read, or does not fit the model."""


@dataclass(frozen=True)
class DataSpec:
    """Settings of a file of labelled examples.

    Attributes:
        path: A ``.tsv`` file of two columns, with or without a header, or a ``.jsonl`` file.
        limit: Most examples, from the beginning; None reads all.

    Raises:
        ExampleError: ``limit`` is below 1.
    """

    path: str
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ExampleError(f"limit={self.limit} (limit 1). Raise `limit`")

    @property
    def name(self) -> str:
        """Name of the file without its folder."""
        return Path(self.path).name


class RawExample(NamedTuple):
    """One example.

    Attributes:
        line: Line in the file, from 1.
        text: Text to classify, or source.
        target: Label, or target text.
    """

    line: int
    text: str
    target: str


def read_examples(spec: DataSpec) -> list[RawExample]:
    """Return the examples of a file in order; empty lines are skipped.

    Raises:
        ExampleError: There is no such file, it has another format or no examples, or a line lacks a column.
    """
    path = Path(spec.path)
    if not path.is_file():
        raise ExampleError(f"no file {spec.path}. Give a .tsv or .jsonl file of examples")
    if path.suffix not in _FORMATS:
        raise ExampleError(f"format of {spec.path}: {path.suffix or 'none'} (limit {', '.join(_FORMATS)}). Convert it")
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1)]
    except UnicodeDecodeError as problem:
        raise ExampleError(f"{spec.name} is not UTF-8: byte {problem.start}. Convert it to UTF-8") from problem
    filled = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    rows = _json_rows(spec, filled) if path.suffix == ".jsonl" else _tab_rows(spec, filled)
    found = list(islice(rows, spec.limit or len(filled)))
    if not found:
        raise ExampleError(f"{spec.name} has 0 examples (limit 1). Add a line with a text and its label")
    return found


def _tab_rows(spec: DataSpec, lines: list[tuple[int, str]]) -> Iterator[RawExample]:
    text, label = 0, 1
    header = [] if not lines else [name.strip().lower() for name in lines[0][1].split("\t")]
    columns = [next((name for name in names if name in header), None) for names in (TEXT_COLUMNS, LABEL_COLUMNS)]
    fields = 2
    if columns[0] is not None and all(name.isidentifier() for name in header):
        if columns[1] is None:
            raise ExampleError(_no_column(spec, LABEL_COLUMNS, header))
        text, label = header.index(columns[0]), header.index(columns[1])
        fields, lines = len(header), lines[1:]
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != fields:
            raise ExampleError(
                f"line {number} of {spec.name} has {len(cells)} columns (limit {fields}: text and label). Separate "
                "them by one tab, and add a header if there are more"
            )
        yield _example(spec, number, cells[text], cells[label])


def _json_rows(spec: DataSpec, lines: list[tuple[int, str]]) -> Iterator[RawExample]:
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as problem:
            raise ExampleError(f"line {number} of {spec.name} is not JSON: {problem.msg}. Fix the line") from problem
        if not isinstance(row, dict):
            raise ExampleError(f"line {number} of {spec.name} is not a JSON object: {line[:20]}. Fix the line")
        values = []
        for names in (TEXT_COLUMNS, LABEL_COLUMNS):
            name = next((name for name in names if row.get(name) is not None), None)
            if name is None:
                raise ExampleError(f"line {number}: {_no_column(spec, names, list(row))}")
            values.append(str(row[name]))
        yield _example(spec, number, *values)


def _example(spec: DataSpec, line: int, text: str, target: str) -> RawExample:
    """Return an example; raise ExampleError if its text or label is empty."""
    for name, value in (("text", text), ("label", target)):
        if not value.strip():
            raise ExampleError(f"line {line} of {spec.name} has an empty {name}. Fill it in, or remove the line")
    return RawExample(line, text.strip(), target.strip())


def _no_column(spec: DataSpec, names: tuple[str, ...], found: list[str]) -> str:
    kind = "text" if names is TEXT_COLUMNS else "label"
    return f"{spec.name} has no {kind} column: {', '.join(found)[:80]}. Name a column {' or '.join(names)}"
