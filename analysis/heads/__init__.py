"""Rankings, roles and masks of heads, and comparisons of scores."""
