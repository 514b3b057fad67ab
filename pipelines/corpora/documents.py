"""Documents of a corpus and their problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headscan.pipelines.corpora.corpus_spec import CorpusError
from headscan.pipelines.corpora.texts import StringText, Text

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
        """The whole text; None if the document has a problem.

        It may be larger than memory.
        """
        return None if self.content is None else "".join(self.content.pieces())


class Entry(NamedTuple):
    """A document without its position in the corpus; fields as in `Document`."""

    source: str
    content: Text | None
    problem: Problem | None = None
    detail: str = ""


def text_entry(source: str, text: str) -> Entry:
    """Return the entry of a string: its text, or its problem."""
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
    if not isinstance(value, str):
        return Entry(source, None, "no_text", f"column {column!r} holds {type(value).__name__}, not a string")
    return text_entry(source, value)


def choose_column(columns: Mapping[str, bool], asked: str | None, where: str) -> str:
    """Choose the column to read.

    ``columns`` maps each name to whether it may hold strings.

    Raises:
        CorpusError: The requested column is missing or has no strings, or there are several candidates.
    """
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
