"""Errors that a user can fix, raised by `headscan.analysis`.

Each message is one line with the value, the limit and the fix; the command line prints it and exits with code 2. Any
other exception is a bug.
"""

from __future__ import annotations

from headscan.errors import HeadscanError


class AnalysisError(HeadscanError):
    """Base of all errors that a user can fix."""


class StoreError(AnalysisError):
    """The store cannot be opened, read or written."""


class StoreMissingError(StoreError):
    """The path has no store."""


class NotAStoreError(StoreError):
    """The file is not a headscan store."""


class StoreVersionError(StoreError):
    """The store's schema is newer, or older and cannot be upgraded."""


class StoreChangedError(StoreError):
    """Tables, views or functions of the store differ from the schema."""


class StoreLockedError(StoreError):
    """Another process held the store for longer than the timeout."""


class FinishedArmError(StoreError):
    """A finished arm got responses; another process may have finished it."""


class StoreFullError(StoreError):
    """The store's disk or quota is full; nothing was written."""


class ResumeError(StoreError):
    """Software or device changed since the unfinished run began."""


class MergeError(StoreError):
    """Two stores have other rows of the same run, or are one store."""


class QueryError(AnalysisError):
    """DuckDB refused a query; the message is the first line of DuckDB's."""


class SelectionError(AnalysisError):
    """Heads cannot be ranked or selected."""


class EffectError(AnalysisError):
    """Effects of heads cannot be computed: arms or answers are missing."""


class VerdictError(AnalysisError):
    """Arms cannot be compared: answers are missing or do not pair up."""
