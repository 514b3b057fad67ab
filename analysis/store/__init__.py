"""One DuckDB file: opening, writing, reading."""
