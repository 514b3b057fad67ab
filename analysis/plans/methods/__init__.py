"""Methods that score how much each KV head needs its full cache."""
