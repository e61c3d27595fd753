"""Triton kernels of speculation; imported by name: Triton is not installed everywhere."""
