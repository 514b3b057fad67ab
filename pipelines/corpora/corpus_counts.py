"""Counts of a corpus, filled while sequences are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headscan.pipelines.corpora.documents import Document

#: Number of names kept for each problem.
EXAMPLES = 5


@dataclass
class CorpusReport:
    """Counts of documents, sequences and tokens, and of everything that was dropped.

    Attributes:
        documents: Documents read, including those with problems.
        sequences: Sequences made.
        tokens: Their tokens, special tokens included.
        empty, undecodable, no_text: Dropped documents, by problem.
        truncated: Documents whose end was dropped.
        too_short: Dropped pieces (documents, ends of documents, rest of a pack) with too few tokens.
        dropped_tokens: Tokens in no sequence: cut off, or in pieces that were too short.
        partly_tokenised: Truncated documents whose tokens are only partly in ``dropped_tokens``.
        skipped_files: Files and folders that were not read, by kind.
        stopped_at_limit: True if the limit of sequences ended the reading, so that the counts cover a part.
        examples: The first names for each problem or kind of skipped file, with the reason.
    """

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty: int = 0
    undecodable: int = 0
    no_text: int = 0
    truncated: int = 0
    too_short: int = 0
    dropped_tokens: int = 0
    partly_tokenised: int = 0
    skipped_files: dict[str, int] = field(default_factory=dict)
    stopped_at_limit: bool = False
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add_document(self, document: Document) -> None:
        """Count a document, and its problem if it has one."""
        self.documents += 1
        if document.problem is not None:
            setattr(self, document.problem, getattr(self, document.problem) + 1)
            self.add_example(document.problem, f"{document.source} ({document.detail})")

    def add_skipped(self, skipped: Mapping[str, tuple[str, ...]]) -> None:
        """Count the files of a folder that the corpus does not read."""
        for kind, names in skipped.items():
            self.skipped_files[kind] = self.skipped_files.get(kind, 0) + len(names)
            for name in names[:EXAMPLES]:
                self.add_example(f"skipped {kind}", name)

    def add_example(self, problem: str, name: str) -> None:
        names = self.examples.setdefault(problem, [])
        if len(names) < EXAMPLES:
            names.append(name)

    def lines(self) -> list[str]:
        """Return the report as lines.

        The totals come first, then one line for each kind of dropped data.
        """
        part = ", stopped at the limit" if self.stopped_at_limit else ""
        lines = [f"{self.documents:,} documents, {self.sequences:,} sequences, {self.tokens:,} tokens{part}"]
        lines += self.problems()
        if self.truncated:
            lines.append(f"documents truncated: {self.truncated:,} (the modes chunk and pack keep the rest)")
        if self.dropped_tokens:
            rest = f", and the rest of {self.partly_tokenised:,} long documents" if self.partly_tokenised else ""
            lines.append(f"tokens cut off or in pieces too short: {self.dropped_tokens:,}{rest}")
        return lines

    def problems(self) -> list[str]:
        """Return a line for each problem, with its first names."""
        words = {
            "empty": "empty documents",
            "undecodable": "undecodable documents",
            "no_text": "records without text",
            "too_short": "pieces too short",
        }
        lines = [self._line(getattr(self, key), word, key) for key, word in words.items() if getattr(self, key)]
        return lines + [
            self._line(count, f"skipped, {kind}", f"skipped {kind}") for kind, count in self.skipped_files.items()
        ]

    def _line(self, count: int, words: str, key: str) -> str:
        names = self.examples.get(key, [])
        more = "; ..." if count > len(names) else ""
        return f"{words}: {count:,} ({'; '.join(names)}{more})"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON data."""
        return asdict(self)
