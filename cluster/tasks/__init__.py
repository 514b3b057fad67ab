"""Pools as an interface, and tasks that run range by range of layers."""
