"""Write the digest of the schema, as the installed DuckDB writes it, into `DIGESTS`: ``make schema``."""

from __future__ import annotations

import re

import duckdb

from headscan.store.connection import declared, digest
from tests.sources import ROOT

CONNECTION = ROOT / "headscan" / "store" / "connection.py"


def with_digest(source: str, version: str, found: str) -> str:
    """Return the source of `connection` with the digest of a version of DuckDB. If it replaces another one, the schema
    has changed, and the digests of other versions are dropped.
    """
    match = re.search(r"^DIGESTS: .* = \{([^}]*)\}", source, re.MULTILINE)
    assert match is not None
    known = dict(re.findall(r'"(.*?)": "(.*?)"', match[1]))
    if known.get(version, found) != found:
        known = {}
    entries = [f'"{each}": "{value}"' for each, value in sorted((known | {version: found}).items())]
    # As the formatter has it: one entry fits on the line.
    lines = entries[0] if len(entries) == 1 else "\n" + "".join(f"    {entry},\n" for entry in entries)
    return source[: match.start(1)] + lines + source[match.end(1) :]


def main() -> None:
    before = CONNECTION.read_text(encoding="utf-8")
    after = with_digest(before, duckdb.__version__, digest(declared()))
    if after == before:
        print(f"the digest of the schema for DuckDB {duckdb.__version__} is up to date")
        return
    CONNECTION.write_text(after, encoding="utf-8")
    print(f"wrote the digest of the schema for DuckDB {duckdb.__version__} to {CONNECTION.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
