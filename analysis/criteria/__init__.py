"""Comparison of the criteria by which heads are removed."""
