"""Documents of a corpus and their problems."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol, cast

from headscan.errors import first_line
from headscan.settings.corpus_settings import CorpusError

#: Suffixes of compressed files that can be read.
COMPRESSIONS = frozenset({".gz", ".zst"})

#: Bytes that are read and decoded at a time.
PIECE_BYTES = 1 << 20


class Text(Protocol):
    """A document's text, which may be larger than memory."""

    def pieces(self) -> Iterator[str]:
        """Yield the text in consecutive pieces."""


@dataclass(frozen=True)
class StringText:
    text: str

    def pieces(self) -> Iterator[str]:
        yield self.text


@dataclass(frozen=True)
class FileText:
    """The text of a file, read on each call."""

    path: Path

    def pieces(self) -> Iterator[str]:
        return decoded(self.path)


class NotTextError(CorpusError):
    """A file is not text in UTF-8, or in the encoding of its byte order mark; ``detail`` is the reason, without the
    file's name.
    """

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path} is not text: {detail}. Convert it to UTF-8")
        self.detail = detail


#: Byte order marks and their encodings; the mark of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def encoding_of(beginning: bytes) -> str:
    """Return the encoding of a file from its first four bytes: that of its byte order mark, or UTF-8."""
    return next((name for mark, name in _MARKS.items() if beginning.startswith(mark)), "utf-8-sig")


def decoded(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces, decompressed, without a BOM, with every line end as a line feed."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    decoder, position = None, 0
    with open_bytes(path) as stream:
        while True:
            content = stream.read(PIECE_BYTES)
            if decoder is None:
                encoding = encoding_of(content)
                decoder = codecs.getincrementaldecoder(encoding)()
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                name, at = encoding.removesuffix("-sig").upper(), position - undecoded + error.start
                raise NotTextError(path, f"not {name} at byte {at}") from error
            if "\0" in text:
                raise NotTextError(path, "a NUL byte: binary, or not UTF-8")
            text = newlines.decode(text, final=not content)
            if text:
                yield text
            if not content:
                return
            position += len(content)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; ``.gz`` and ``.zst`` files are decompressed while they are read."""
    suffix = path.suffix.lower()
    try:
        with _opened(path, suffix) as stream:
            yield stream
    except (EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        # Decompressors report damage as an OSError without errno; errors of the system have one.
        if error.errno is None and suffix in COMPRESSIONS:
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error


def _opened(path: Path, suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".zst":
        import pyarrow as pa

        with path.open("rb"):
            pass  # raises the system's error, because pyarrow's error for an unreadable file has no reason
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"cannot read {path}: {error.strerror or error}. Check the path and its permissions")


def _damaged(path: Path, error: Exception) -> CorpusError:
    return CorpusError(f"{path} is damaged or incomplete: {first_line(error)}. Write or download it again")


#: ``empty``: only white space, or no records. ``undecodable``: not UTF-8, a broken record, or a damaged table.
#: ``no_text``: a record whose text column is missing or not a string.
Problem = Literal["empty", "undecodable", "no_text"]


@dataclass(frozen=True)
class Document:
    """A document: its ``content``, or the ``problem`` that it has instead.

    ``index`` is its position in the corpus, including documents with problems. ``source`` is a file's name relative to
    the corpus, with the line or row (from 1) if the file holds several documents. ``detail`` describes the problem.
    """

    index: int
    source: str
    content: Text | None
    problem: Problem | None = None
    detail: str = ""

    @property
    def text(self) -> str | None:
        """The whole text, which may be larger than memory; None if the document has a problem."""
        return None if self.content is None else "".join(self.content.pieces())


class Entry(NamedTuple):
    """A document without its position in the corpus; fields as in `Document`."""

    source: str
    content: Text | None
    problem: Problem | None = None
    detail: str = ""


def text_entry(source: str, text: str) -> Entry:
    if not text.strip():
        return blank_entry(source)
    try:
        text.encode()  # JSON escapes can encode a lone surrogate, which tokenizers reject
    except UnicodeEncodeError as error:
        return Entry(source, None, "undecodable", f"lone surrogate at character {error.start}")
    return Entry(source, StringText(text))


def blank_entry(source: str) -> Entry:
    """Return the entry of a text that has only white space."""
    return Entry(source, None, "empty", "only white space")


def value_entry(source: str, value: object, column: str) -> Entry:
    """Return the entry of a record's text column; a null is empty."""
    if value is None:
        return Entry(source, None, "empty", f"null in column {column!r}")
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Entry(source, None, "undecodable", f"column {column!r} is not UTF-8 at byte {error.start}")
    if not isinstance(value, str):
        return Entry(source, None, "no_text", f"column {column!r} holds {type(value).__name__}, not a string")
    return text_entry(source, value)


def choose_column(columns: Mapping[str, bool], asked: str | None, where: str) -> str:
    """Choose the column to read; ``columns`` maps each name to whether it may hold strings."""
    listing = ", ".join(columns) or "none"
    if asked is not None:
        if asked not in columns:
            raise CorpusError(f"{where} has no column {asked!r}. Choose one of its columns: {listing}")
        if not columns[asked]:
            raise CorpusError(f"column {asked!r} of {where} has no strings. Choose another of its columns: {listing}")
        return asked
    strings = [name for name, is_string in columns.items() if is_string]
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        count = "several string columns" if strings else "no string column"
        raise CorpusError(f"{where} has {count} and none named 'text'. Choose one of its columns: {listing}")
    return strings[0]


class LocalFile(NamedTuple):
    """A file of a corpus; ``name`` is relative to the corpus, with forward slashes."""

    name: str
    path: Path

    @property
    def suffix(self) -> str:
        """The suffix in lower case, without that of a compression."""
        return suffix_of(self.path)

    def is_empty(self) -> bool:
        """Return True if the file has no bytes; raise `CorpusError` if it is missing."""
        try:
            return self.path.stat().st_size == 0
        except OSError as error:
            raise unreadable(self.path, error) from error


def suffix_of(path: Path) -> str:
    """Return a path's suffix in lower case, ``.txt`` for ``a.txt.gz``."""
    return Path(path.stem if is_compressed(path) else path.name).suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS
