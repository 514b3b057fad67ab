"""The GPU proof: every CUDA path against slow references, and what measuring costs on a GPU.

    python -m headscan.gpu_proof

It needs torch, transformers and accelerate alone. `__main__` describes the options.
"""
