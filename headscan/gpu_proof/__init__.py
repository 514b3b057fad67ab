"""The GPU proof: every CUDA path against slow references, and the overhead of measuring on a GPU.

    python -m headscan.gpu_proof

It needs torch, transformers and accelerate alone. `__main__` describes the options.
"""
