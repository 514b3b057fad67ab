"""Verbs that ablate heads."""
