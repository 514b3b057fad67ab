"""Passes through part of a model's layers, and passes of sequences that share a prefix."""
