"""Models of which only some layers have weights."""
