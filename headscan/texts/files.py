"""Local files: listing folders, reading text and JSON, and the table of formats."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from headscan.errors import one_line
from headscan.settings.corpus_settings import CorpusError
from headscan.texts.data_sets import read_table
from headscan.texts.documents import (
    Entry,
    FileText,
    LocalFile,
    NotTextError,
    blank_entry,
    choose_column,
    decoded,
    encoding_of,
    is_compressed,
    open_bytes,
    suffix_of,
    text_entry,
    unreadable,
    value_entry,
)

_TEXT_KINDS = (
    "txt text md markdown rst tex org adoc log"
    " py pyi c h cc cpp cxx hh hpp cu cuh cs go java js jsx mjs ts tsx rs rb php pl pm sh bash"
    " sql swift kt kts scala lua r jl hs ml mli clj ex exs erl el lisp f90 m zig nim dart vue html htm css"
    " scss xml yaml yml toml ini cfg cmake proto"
)
#: One file is one document.
TEXT_SUFFIXES = frozenset(f".{kind}" for kind in _TEXT_KINDS.split())

#: Number of first records that decide which columns a file has.
_PEEK = 100

#: Most bytes of a decompressed JSON value; parsing needs several times as much memory.
_JSON_BYTES = 1 << 30


def list_folder(root: Path) -> tuple[tuple[LocalFile, ...], dict[str, tuple[str, ...]]]:
    """Return all files of known types under ``root``, and the names of others by kind; hidden and linked folders are
    skipped.
    """

    def refuse(error: OSError) -> None:
        raise CorpusError(
            f"cannot list folder {error.filename}: {error.strerror}. Give a folder that you can read"
        ) from error

    files: list[LocalFile] = []
    skipped: dict[str, list[str]] = {}
    for folder, folder_names, file_names in os.walk(root, onerror=refuse):
        here = Path(folder)
        entered = []
        for name in folder_names:
            if name.startswith("."):
                skipped.setdefault("hidden folder", []).append(_relative(here / name, root))
            elif (here / name).is_symlink():
                skipped.setdefault("linked folder", []).append(_relative(here / name, root))
            else:
                entered.append(name)
        folder_names[:] = entered
        for name in file_names:
            path = here / name
            kind = _skipped_kind(path)
            if kind is None:
                files.append(LocalFile(_relative(path, root), path))
            else:
                skipped.setdefault(kind, []).append(_relative(path, root))
    return tuple(sorted(files)), {kind: tuple(sorted(names)) for kind, names in sorted(skipped.items())}


def _skipped_kind(path: Path) -> str | None:
    """Return why a file is skipped; None if it is read."""
    if not path.is_file():
        return "not a file"  # a broken link, a pipe or a socket, where reading could block forever
    if path.name.startswith("."):
        return "hidden file"
    suffix, compression = suffix_of(path), path.suffix.lower() if is_compressed(path) else ""
    form = FORMATS.get(suffix)
    if suffix in TEXT_SUFFIXES or (form is not None and (form.compressed or not compression)):
        return None
    return suffix + compression or "no suffix"


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal; raise `CorpusError` if the file cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def read_text(file: LocalFile) -> Iterator[Entry]:
    """Yield a text file as one entry. A long file is checked here and read again for its text."""
    blank = True
    try:
        pieces = decoded(file.path)
        text = next(pieces, "")
        following = next(pieces, None)
        if following is None:
            yield text_entry(file.name, text)
            return
        for piece in chain((text, following), pieces):
            blank = blank and not piece.strip()
    except NotTextError as error:
        yield Entry(file.name, None, "undecodable", error.detail)
        return
    yield blank_entry(file.name) if blank else Entry(file.name, FileText(file.path))


def read_json(file: LocalFile, column: str | None) -> Iterator[Entry]:
    """Yield the entries of a ``.json`` file, which has a list, one record, or a record per line."""
    with open_bytes(file.path) as stream:
        content = stream.read(_JSON_BYTES + 1)
    try:
        if len(content) > _JSON_BYTES:
            raise _TooLargeError
        value = json.loads(content.decode(encoding_of(content)))
    except (ValueError, RecursionError) as error:
        by_lines = isinstance(error, json.JSONDecodeError | _TooLargeError)
        del content  # frees memory before the file is read again
        if by_lines and isinstance(_parse_line(next(_lines(file.path), b"")), dict):
            yield from read_lines(file, column)
        else:
            yield Entry(file.name, None, "undecodable", _json_problem(error))
        return
    if isinstance(value, list):
        yield from _records(((f"{file.name}:{i}", item) for i, item in enumerate(value, 1)), column, file.name)
    elif isinstance(value, dict):
        # Source folders contain JSON settings. An object without the column is a document without text; its other
        # strings are not used.
        yield _record_entry(file.name, value, column or "text")
    else:
        yield value_entry(file.name, value, column or "text")


def read_lines(file: LocalFile, column: str | None) -> Iterator[Entry]:
    """Yield the entries of a JSON Lines file in constant memory: a record or a string per line, without blank lines.
    With ``datasets`` one broken line would end the whole file; here it is an entry with its line number.
    """

    def parsed() -> Iterator[tuple[str, Any]]:
        number = 0
        try:
            for number, line in enumerate(_lines(file.path), 1):
                if line is None or line.strip():
                    yield f"{file.name}:{number}", _parse_line(line)
        except UnicodeDecodeError as error:
            yield f"{file.name}:{number + 1}", _Broken(f"damaged after line {number}: {one_line(error)}")

    yield from _records(parsed(), column, file.name)


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file in UTF-8; None for a line of more than `_JSON_BYTES` bytes. Bytes that are not UTF-8
    stay as they are, but in a file with the byte order mark of another encoding they raise UnicodeDecodeError.
    """
    with open_bytes(path) as stream:
        encoding = encoding_of(cast("io.BufferedReader", stream).peek(4)[:4])  # compressed streams cannot seek
        read = stream.readline if encoding == "utf-8-sig" else _in_utf8(stream, encoding)
        while line := read(_JSON_BYTES):
            too_long = False
            while len(line) >= _JSON_BYTES and not line.endswith(b"\n"):
                too_long, line = True, read(_JSON_BYTES)
            yield None if too_long else line


def _in_utf8(stream: IO[bytes], encoding: str) -> Callable[[int], bytes]:
    """Return a function that reads a line of a stream in another encoding, as UTF-8."""
    text = io.TextIOWrapper(stream, encoding, newline="\n")
    return lambda size: text.readline(size).encode("utf-8", "surrogatepass")


class _TooLargeError(ValueError):
    """A JSON value has more than `_JSON_BYTES` bytes."""


class _Broken(NamedTuple):
    """A line that is not JSON."""

    reason: str


def _parse_line(line: bytes | None) -> Any:
    try:
        if line is None:
            raise _TooLargeError
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return _Broken(_json_problem(error))


def _json_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, _TooLargeError):
        return f"more than {_JSON_BYTES >> 20} MiB of JSON in one value. Write it as JSON Lines, one record per line"
    return "JSON nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"


def _records(records: Iterable[tuple[str, Any]], column: str | None, where: str) -> Iterator[Entry]:
    """Yield the entries of ``(source, record)`` pairs; the first objects decide the column."""
    stream = iter(records)
    head = list(islice(stream, _PEEK))
    columns: dict[str, bool] = {}
    for _, record in head:
        if isinstance(record, dict):
            for name, value in record.items():
                columns[name] = columns.get(name, False) or value is None or isinstance(value, str)
    chosen = choose_column(columns, column, where) if columns else column or "text"
    for group in (head, stream):
        for source, record in group:
            yield _record_entry(source, record, chosen)


def _record_entry(source: str, record: Any, column: str) -> Entry:
    if isinstance(record, _Broken):
        return Entry(source, None, "undecodable", record.reason)
    if isinstance(record, str):
        return text_entry(source, record)
    if isinstance(record, dict):
        if column in record:
            return value_entry(source, record[column], column)
        return Entry(source, None, "no_text", f"no column {column!r}")
    return Entry(source, None, "no_text", f"a record that is {type(record).__name__}, neither object nor string")


class Format(NamedTuple):
    """A format of files that hold many records with a text column.

    Attributes:
        read: Yields the entries of a file, with the name of the column; None chooses it.
        compressed: Compressed files are read, too.
    """

    read: Callable[[LocalFile, str | None], Iterator[Entry]]
    compressed: bool = True


#: Formats by suffix.
FORMATS = {
    ".json": Format(read_json),
    ".jsonl": Format(read_lines),
    ".ndjson": Format(read_lines),
    ".parquet": Format(read_table, compressed=False),
    ".csv": Format(read_table, compressed=False),
    ".tsv": Format(read_table, compressed=False),
}


def read_file(file: LocalFile, column: str | None) -> Iterator[Entry]:
    """Yield the entries of a file; one of no format is a text."""
    if file.is_empty():
        return iter((Entry(file.name, None, "empty", "0 bytes"),))
    form = FORMATS.get(file.suffix)
    return read_text(file) if form is None else form.read(file, column)
