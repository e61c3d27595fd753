"""Parts of `bench_weight_update.py`: the trainer's process, and pauses under load."""
