"""Head plans: what each KV head may drop, and the files that hold it."""
