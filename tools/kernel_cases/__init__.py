"""What tools/compile_kernels.py calls of each kernel, by title; the first of each module is compiled in quick runs."""
