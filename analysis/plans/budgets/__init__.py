"""Plans from keep-scores and a budget."""
