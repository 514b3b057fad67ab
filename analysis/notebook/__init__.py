"""Stores in notebooks: tables as DuckDB relations."""
