"""Importance of heads on a corpus: the pool task, and the run."""
