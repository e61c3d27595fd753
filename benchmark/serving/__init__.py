"""Parts of the load generator `bench_serving.py`."""
