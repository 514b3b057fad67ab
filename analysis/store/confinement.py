"""File access of store connections, limited to the store's files.

A read-only connection has no file access. Without external access DuckDB can still read and overwrite its own file, log
and temporary folder (``COPY ... TO '<the store>'``), so its local file system is disabled after the file is open. Then
a query that exceeds the memory fails instead of writing temporary files.
"""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

#: Settings of a writing connection, which uses the store, its log and its temporary folder.
WRITING: Mapping[str, str] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
}

#: Settings of a read-only connection; `confine` disables files once the store is open.
READING: Mapping[str, str] = {**WRITING, "temp_directory": ""}


def confine(connection: duckdb.DuckDBPyConnection) -> None:
    """Disable file access of a read-only connection permanently.

    Connections of one process to one store share settings, so a second connection finds them locked and files disabled.
    """
    try:
        connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
        connection.execute("SET lock_configuration = true")
    except duckdb.InvalidInputException:
        if connection.execute("SELECT system.main.current_setting('lock_configuration')").fetchone() != (True,):
            raise
