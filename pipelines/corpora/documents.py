"""One document of a corpus, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headscan.pipelines.corpora.corpus_spec import CorpusError
from headscan.pipelines.corpora.texts import StringText, Text

#: ``empty``: nothing but white space, or no records. ``undecodable``: not UTF-8, a broken record, a damaged table.
#: ``no_text``: a record whose text column is missing or not a string.
Problem = Literal["empty", "undecodable", "no_text"]


@dataclass(frozen=True)
class Document:
    """A document as read: its ``content``, or the ``problem`` that it has instead.

    ``index`` is its place in the corpus, documents with problems included. ``source`` says where it came from: a file's
    name relative to the corpus, with the line or row (from 1) where a file holds many. ``detail`` says in words what is
    wrong.
    """

    index: int
    source: str
    content: Text | None
    problem: Problem | None = None
    detail: str = ""

    @property
    def text(self) -> str | None:
        """The whole text in one string, which may be larger than memory; None if the document has a problem."""
        return None if self.content is None else "".join(self.content.pieces())


class Entry(NamedTuple):
    """A document before it has a place in the corpus; fields as in `Document`."""

    source: str
    content: Text | None
    problem: Problem | None = None
    detail: str = ""


def text_entry(source: str, text: str) -> Entry:
    """A string as an entry: with its text, or with the problem that keeps it from being scanned."""
    if not text.strip():
        return blank_entry(source)
    try:
        text.encode()  # JSON escapes can spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        return Entry(source, None, "undecodable", f"half a surrogate pair at character {error.start}")
    return Entry(source, StringText(text))


def blank_entry(source: str) -> Entry:
    """The entry of a text without a character that is not white space."""
    return Entry(source, None, "empty", "no characters but white space")


def value_entry(source: str, value: object, column: str) -> Entry:
    """What a record holds in its text column, as an entry; None counts as empty."""
    if value is None:
        return Entry(source, None, "empty", f"null in column {column!r}")
    if not isinstance(value, str):
        return Entry(source, None, "no_text", f"column {column!r} holds {type(value).__name__}, not a string")
    return text_entry(source, value)


def choose_column(columns: Mapping[str, bool], asked: str | None, where: str) -> str:
    """The column to read; ``columns`` says of each column whether it may hold strings.

    Raises:
        CorpusError: the asked column is missing or holds no strings, or none is asked for and the choice is open.
    """
    listing = ", ".join(columns) or "none"
    if asked is not None:
        if asked not in columns:
            raise CorpusError(f"{where} has no column {asked!r}; its columns: {listing}")
        if not columns[asked]:
            raise CorpusError(f"column {asked!r} of {where} holds no strings; its columns: {listing}")
        return asked
    strings = [name for name, is_string in columns.items() if is_string]
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        count = "several columns" if strings else "no column"
        raise CorpusError(
            f"{where} has {count} of strings and none named 'text': name the column; its columns: {listing}"
        )
    return strings[0]
