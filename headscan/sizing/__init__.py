"""Bytes and FLOPs of a model before it is loaded: weights, activations, KV cache, passes."""
