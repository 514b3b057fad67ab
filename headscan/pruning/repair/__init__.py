"""New weights for the projections that remain after heads were removed."""
