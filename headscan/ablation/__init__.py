"""Ablating heads: running a model with the outputs of some heads replaced.

`intervention` holds the context in which a model runs, the record of ablated heads, the replacements and the base
classes. The ablations are `masks` (fixed heads, and random ones) and `rules` (heads chosen for each input by their
scores). `collect_outputs` measures means and samples that replace outputs.
"""
