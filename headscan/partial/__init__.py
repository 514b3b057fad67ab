"""Models that load a range of layers at a time."""
