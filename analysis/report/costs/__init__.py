"""Report sections on what arms, caches, criteria and pruned models cost."""
