"""What a user can mend in the analysis room.

Each message is one line that names the value, the limit and the mend; the command line prints it and exits with code 2.
Anything else that is raised here is a bug.
"""

from __future__ import annotations

from headscan.errors import HeadscanError


class AnalysisError(HeadscanError):
    """Base of every error a user can mend."""


class StoreError(AnalysisError):
    """The store cannot be opened, read or written."""


class StoreMissingError(StoreError):
    """There is no store at the path."""


class NotAStoreError(StoreError):
    """The file is something else than a headscan store."""


class StoreVersionError(StoreError):
    """The store has a newer schema, or an older one and cannot be upgraded."""


class StoreChangedError(StoreError):
    """The store's tables, views or functions are not those of the schema."""


class StoreLockedError(StoreError):
    """Another process kept the store open for longer than the timeout."""


class FinishedArmError(StoreError):
    """An arm is finished and takes no more responses; another process may have finished it."""


class StoreFullError(StoreError):
    """The device or the quota under the store is full; what was being written was rolled back."""


class ResumeError(StoreError):
    """An unfinished run used other software or another device than the process that resumes it."""


class QueryError(AnalysisError):
    """A query that DuckDB refuses, in DuckDB's own words."""


class SelectionError(AnalysisError):
    """Heads cannot be ranked or selected as asked."""


class VerdictError(AnalysisError):
    """Arms cannot be compared: answers are missing or do not pair up."""
