"""Placements: which devices a model runs on."""
