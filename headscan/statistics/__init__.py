"""The implementation of every statistic and profile that the catalogue declares.

`weight_statistics` are those of attention weights, `norm_statistics` those of values and outputs. `registry` finds
them by name and runs them.
"""
