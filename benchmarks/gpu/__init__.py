"""Proves and times the GPU kernels and the cuda backend on one card, in one process, without files or network."""
