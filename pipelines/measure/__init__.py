"""Scans and probes: measure with a pool, write to the store."""
