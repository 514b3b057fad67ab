"""Pruned models: heads chosen, repaired, removed, saved and judged."""
