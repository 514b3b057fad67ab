"""The GPU proof: CUDA paths against references, and overhead of measuring.

    python -m headscan.gpu_proof

It needs torch, transformers and accelerate alone. `__main__` describes the options.
"""
