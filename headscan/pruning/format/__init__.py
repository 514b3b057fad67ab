"""Classes of pruned models, and the code that is copied next to their weights."""
