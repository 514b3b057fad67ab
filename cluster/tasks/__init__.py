"""The interface of pools, and tasks that run range by range of the layers."""
