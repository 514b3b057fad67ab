"""The interface of pools, and tasks that run by layer ranges."""
