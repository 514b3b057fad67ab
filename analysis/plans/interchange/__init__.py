"""Patterns of other tools: which KV heads keep their full cache."""
