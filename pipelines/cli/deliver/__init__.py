"""Verbs that hand results on."""
