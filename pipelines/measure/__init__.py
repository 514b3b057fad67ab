"""Scans, probes, importance and gates: measure with a pool, write to the store."""
