"""Attention calls: how they are intercepted, computed and reduced to statistics.

`discovery` finds the heads of a model, which it checks on a `small_copy` too, and `hooks` attaches to them. `calls`
measures one call, by fused kernels (`fused`) or by blocks of explicit weights. `cache_attention` serves caches with
windows.
"""
