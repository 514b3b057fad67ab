"""The implementation of every statistic, profile and score that the catalogue declares.

`weight_statistics` are those of attention weights, `norm_statistics` those of values and outputs. `registry` finds
them by name and runs them, and `scores` follow from their numbers.
"""
