"""KV caches that keep less.

`headscan.windows` says what a KV head keeps. `kv_windows` applies it as masks to whole texts, and `kv_damage` estimates
the loss that it costs, `damage_bytes` the memory that this takes. `padded_masks` finds the text of each row in a mask.
For generation, `plan_cache` is the cache, `plan_layer` its part in one layer, `window_keys` the keys that it holds, and
`decode_attention` the attention of new tokens to them.
"""
