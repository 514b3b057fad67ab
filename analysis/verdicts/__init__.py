"""Ablated arms against their baseline: differences, controls, recall, curves."""
