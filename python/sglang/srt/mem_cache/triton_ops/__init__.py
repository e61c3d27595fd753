"""Triton kernels of the memory layer; imported by name: Triton is not installed everywhere."""
