"""The kernels that `bench_attention.py` and `bench_gemv.py` time, and how: needs Triton."""
