"""Run records, identity, software, progress."""
