"""Labelled examples of a user: read from a file, tokenised, and their losses."""
