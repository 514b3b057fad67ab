"""Passes through part of a model's layers, and with shared prefixes."""
