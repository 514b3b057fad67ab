"""Head plans: which tokens each KV head keeps in the cache, and plan files."""
