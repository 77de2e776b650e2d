"""What the Triton kernels share: facts of the GPU, tuned configurations, number formats."""
