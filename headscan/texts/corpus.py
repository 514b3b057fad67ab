"""Open a corpus by name."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from headscan.errors import first_line
from headscan.settings.corpus_settings import CorpusError, CorpusSpec
from headscan.text_tables import counted
from headscan.texts.data_sets import open_hub, read_hub
from headscan.texts.documents import Document, Entry, LocalFile, is_compressed, suffix_of, text_entry
from headscan.texts.files import FORMATS, TEXT_SUFFIXES, hash_file, list_folder, read_file
from headscan.texts.stdlib_files import LIBRARY, held_out_files, seen_modules, standard_library_files

if TYPE_CHECKING:
    from datasets import IterableDataset


class BuiltIn(NamedTuple):
    """A corpus that needs no files of the user: its description, and its files in the standard library."""

    description: str
    files: Callable[[], Iterable[Path]]


#: Built-in corpora by name; `BUILT_IN_CORPORA` lists the names for help.
BUILT_IN = {
    "python-stdlib": BuiltIn("source files of the running interpreter's standard library", standard_library_files),
    "python-stdlib-modules": BuiltIn(
        "single-file modules of the standard library in the demo model's training data", seen_modules
    ),
    "python-stdlib-heldout": BuiltIn(
        "standard-library modules that are not in the demo model's training data", held_out_files
    ),
}

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Corpus(ABC):
    """An opened corpus, which can be read repeatedly in the same order."""

    spec: CorpusSpec
    #: Description for messages.
    description: str
    #: Names of files that are not read, by kind (a suffix, "no suffix", "hidden file", ...).
    skipped: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    #: Characters from which a draw reads a part of each file (`drawing.Draw`).
    most_characters = 1 << 30

    @property
    def file_count(self) -> int:
        """Number of files; a stream is one."""
        return 1

    @abstractmethod
    def entries(self) -> Iterator[Iterator[Entry]]:
        """Yield the documents of each file, without a limit."""

    @abstractmethod
    def identity(self) -> object:
        """Return JSON data that identifies the content."""

    def files(self) -> Iterator[Iterator[Document]]:
        """Yield the documents of each file in order, including those with problems, until ``spec.limit_documents`` had
        text. A file that is not read to its end leaves the rest of its documents without numbers.
        """
        index, left = 0, self.spec.limit_documents

        def numbered(entries: Iterator[Entry]) -> Iterator[Document]:
            nonlocal index, left
            while left != 0 and (entry := next(entries, None)) is not None:
                if left is not None:
                    left -= entry.problem is None
                index += 1
                yield Document(index - 1, entry.source, entry.content, entry.problem, entry.detail)

        return map(numbered, self.entries())

    def documents(self) -> Iterator[Document]:
        """Yield the documents of all files."""
        return chain.from_iterable(self.files())

    def fingerprint(self) -> str:
        """Return a SHA-256 in hexadecimal that identifies the documents.

        Local corpora hash relative names and contents of their files, so a moved folder keeps its fingerprint. Hub
        corpora hash name, config, split and revision; only a commit as revision pins their contents.
        """
        data = {"column": self.spec.column, "limit_documents": self.spec.limit_documents, "identity": self.identity()}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class LocalCorpus(Corpus):
    spec: CorpusSpec
    description: str
    local_files: tuple[LocalFile, ...]
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def file_count(self) -> int:
        return len(self.local_files)

    def entries(self) -> Iterator[Iterator[Entry]]:
        return map(self._entries_of, self.local_files)

    def _entries_of(self, file: LocalFile) -> Iterator[Entry]:
        any_entry = False
        for entry in read_file(file, self.spec.column):
            any_entry = True
            yield entry
        if not any_entry:
            yield Entry(file.name, None, "empty", "no records")

    def identity(self) -> object:
        return [[file.name, hash_file(file.path)] for file in self.local_files]


@dataclass(frozen=True)
class HubCorpus(Corpus):
    spec: CorpusSpec
    description: str
    data: IterableDataset
    #: A stream is read twice, over the network.
    most_characters = 1 << 24

    def entries(self) -> Iterator[Iterator[Entry]]:
        return iter([read_hub(self.spec, self.data)])

    def identity(self) -> object:
        fields = asdict(self.spec)
        return {name: fields[name] for name in ("name", "config", "split", "revision")}


class GivenTexts(Corpus):
    """Texts of the caller, one document each."""

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise CorpusError(f"`texts` is one text: {texts[:20]!r}. Pass a list of texts")
        self.spec, self.texts, self.description = CorpusSpec("texts"), tuple(texts), counted(len(texts), "text")

    def entries(self) -> Iterator[Iterator[Entry]]:
        return iter([(text_entry(f"text {number}", text) for number, text in enumerate(self.texts, 1))])

    def identity(self) -> object:
        return self.texts


def open_corpus(spec: CorpusSpec) -> Corpus:
    """Open a built-in corpus, a file or folder, or hub data. A file of unknown suffix is read as text, except in a
    folder, where it is skipped and listed in ``.skipped``.
    """
    check_corpus(spec.name)
    if (built_in := BUILT_IN.get(spec.name)) is not None:
        names = ((path.relative_to(LIBRARY).as_posix(), path) for path in built_in.files())
        return _local(spec, built_in.description, tuple(LocalFile(name, path) for name, path in names))
    path = Path(spec.name).expanduser()
    if path.is_file():
        return _local(spec, f"file {spec.name}", (LocalFile(path.name, path),))
    if path.is_dir():
        return _open_folder(spec, path)
    return HubCorpus(spec, f"hub data set {spec.name}", open_hub(spec))


def check_corpus(name: str) -> None:
    """Raise CorpusError if a name is no built-in corpus, no file or folder, and cannot be on the hub. This reads and
    imports nothing, so that a wrong path is reported before a model loads.
    """
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise CorpusError(f"invalid corpus name {name!r}: {first_line(error)}") from error
    form = FORMATS.get(suffix_of(path))
    if is_file and is_compressed(path) and form is not None and not form.compressed:
        raise CorpusError(f"corpus {name!r} is a compressed table. Decompress it")
    if name in BUILT_IN or is_folder or is_file:
        return
    if not _HUB_NAME.fullmatch(name) or suffix_of(path) in {*TEXT_SUFFIXES, *FORMATS}:
        raise CorpusError(
            f"corpus {name!r} is not built in ({', '.join(BUILT_IN)}), is no file or folder, and is no hub name"
            " (owner/name). Check the path"
        )


def _open_folder(spec: CorpusSpec, path: Path) -> Corpus:
    if any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        raise CorpusError(f"folder {spec.name!r} was written by save_to_disk. Write it with to_parquet instead")
    files, skipped = list_folder(path)
    if not files:
        kinds = ", ".join(f"{len(names)} {kind}" for kind, names in skipped.items()) or "no files"
        raise CorpusError(
            f"folder {spec.name!r} has no file of a known type (text, source, JSON, parquet, CSV): {kinds}"
        )
    count = counted(len(files), "file")
    return _local(spec, f"folder {spec.name} ({count})", files, skipped)


def _local(
    spec: CorpusSpec,
    description: str,
    files: tuple[LocalFile, ...],
    skipped: Mapping[str, tuple[str, ...]] | None = None,
) -> LocalCorpus:
    for option, default in (("config", None), ("split", "train"), ("revision", None)):
        if getattr(spec, option) != default:
            value = getattr(spec, option)
            raise CorpusError(f"corpus {spec.name!r} is local and has no {option} {value!r}. Leave out {option}")
    if spec.column is not None and not any(file.suffix in FORMATS for file in files):
        raise CorpusError(f"corpus {spec.name!r} is plain text and has no column {spec.column!r}. Leave out column")
    return LocalCorpus(spec, description, files, skipped or {})
