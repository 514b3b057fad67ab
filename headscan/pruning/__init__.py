"""Removal of heads: selection, repair, slicing, saving and loading."""
