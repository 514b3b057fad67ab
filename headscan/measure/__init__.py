"""Statistics, scores and behaviours of every head."""
