"""Scans and probes: shards through a pool into the store."""
