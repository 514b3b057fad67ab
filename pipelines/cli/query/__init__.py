"""Verbs that read the store."""
