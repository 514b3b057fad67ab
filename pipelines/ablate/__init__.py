"""Effects of single heads: an arm for every head, and the table of their effects."""
