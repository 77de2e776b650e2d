"""The cuda backend: Triton kernels, decode steps as CUDA graphs, and on a CPU the same under Triton's interpreter.

What computes (`model`, `backend` and what they import) needs torch, triton and numpy alone, no native code and no
stubs; only loading (`load`) reads checkpoints.
"""
