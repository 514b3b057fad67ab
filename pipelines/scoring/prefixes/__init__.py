"""Prefixes that several requests have in common, read once."""
