"""Pools that run one task for many items, one file per pool."""
