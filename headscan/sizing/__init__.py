"""Costs of a model before it is loaded: bytes (`model_sizes`) and FLOPs of a pass (`forward_flops`)."""
