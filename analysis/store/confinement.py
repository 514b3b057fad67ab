"""What a connection to a store may reach: its own file, and nothing else.

A connection that only reads cannot use files at all. DuckDB lets a database without external access still read and
overwrite its own file, its log and its temporary folder (``COPY ... TO '<the store>'``); to turn its local file system
off after the file is open closes this way too. A query that needs more memory than there is then fails instead of
writing temporary files.
"""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

#: A connection that writes uses the store, its log and its temporary folder.
WRITING: Mapping[str, str] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
}

#: For a connection that only reads; ``confine`` does the rest once the file is open.
READING: Mapping[str, str] = {**WRITING, "temp_directory": ""}


def confine(connection: duckdb.DuckDBPyConnection) -> None:
    """Turn off files for a connection that only reads, for good.

    Connections of one process to one store share their settings: the second finds them locked, and files are off before
    that.
    """
    try:
        connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
        connection.execute("SET lock_configuration = true")
    except duckdb.InvalidInputException:
        if connection.execute("SELECT system.main.current_setting('lock_configuration')").fetchone() != (True,):
            raise
