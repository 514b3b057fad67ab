"""Rankings of heads, and comparisons of scores."""
