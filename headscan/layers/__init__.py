"""Running part of a model's layers, or several sequences that share a prefix."""
