"""KV caches that keep less: windows per KV head, the damage they cause, and a cache for generation."""
