"""Passes through part of a model's layers, and with shared prefixes.

`blocks` runs and resumes at any layer of a loaded model. `layer_ranges` runs a model of which only some layers are
loaded, by `lazy_model`. `prefix_cache` shares a prefix by its KV cache, `shared_rows` by one row with several
endings.
"""
