"""Verbs to begin with."""
