#!/usr/bin/env python3
"""Flags that replicas on one host need beside the user's: a common name, and a share of the memory.

    scripts/replica_flags.py N SMALL_MODEL_FOLDER [server flags]

Called by serve_replicas.sh. Prints one word a line on standard output, and what is worth knowing on
standard error. Ends with 2 and the server's own words where the flags are wrong.

Pages of a storage carry the served model's name, which is the text of --model-path where no other
is given; a folder's own name is the same on every host. On a CPU a server takes a quarter of what
is free for KV and up to twice as much for the host pool, as if it were alone; N replicas together
should leave half. What the user says about either is left as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.mem_cache.host_pool_sizing import DEFAULT_RATIO, host_memory_info
from sglang.srt.model_executor.kv_cache_sizing import CPU_DEFAULT_CONTEXTS, CPU_DEFAULT_SHARE
from sglang.srt.model_executor.kv_pools import kv_bytes_per_token
from sglang.srt.model_executor.model_runner import resolve_kv_dtype
from sglang.srt.server_args import ServerArgs, prepare_server_args

SHARE_OF_FREE = 0.5
_USAGE = "scripts/replica_flags.py N SMALL_MODEL_FOLDER [server flags]"
_OF_SERVE_SH = ("--no-speculation", "--no-hicache", "--no-storage")


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if {"-h", "--help"} & set(words[:2]):
        sys.stdout.write(__doc__ or "")
        return 0
    if len(words) < 2 or not words[0].isdecimal() or int(words[0]) < 1:
        sys.stderr.write(f"usage: {_USAGE}\n")
        return 2
    logging.disable()
    try:
        return _run(words)
    finally:
        logging.disable(logging.NOTSET)


def _run(words: Sequence[str]) -> int:
    num_replicas, small_model = int(words[0]), words[1]
    given = [word for word in words[2:] if word not in _OF_SERVE_SH]
    try:
        args = prepare_server_args(given, defaults=["--model-path", small_model or "/none"])
    except ValueError as error:
        sys.stderr.write(f"sglang: error: {error}\n")
        return 2
    has_own_model = args.model_path != small_model
    flags = name_flags(args) if has_own_model else []
    try:
        flags += size_flags(args, num_replicas, host_memory_info().free_bytes)
    except ModelConfigError as error:
        sys.stderr.write(f"[hispec] every replica chooses the size of its caches alone: {error}\n")
    sys.stdout.write("".join(f"{flag}\n" for flag in flags))
    return 0


def name_flags(args: ServerArgs) -> list[str]:
    """Return a name that every host has in common, where the user gave none."""
    name = Path(args.model_path).name
    is_said = args.served_model_name not in (None, args.model_path)
    if is_said or name in ("", args.model_path):
        return []
    return ["--served-model-name", name]


def size_flags(args: ServerArgs, num_replicas: int, free_bytes: int) -> list[str]:
    """Return the size of a replica's KV pool, to which the host pool is in proportion.

    Raises ModelConfigError where the model's configuration cannot be read.
    """
    is_said = args.max_total_tokens is not None or args.mem_fraction_static is not None
    if args.device != "cpu" or num_replicas == 1 or is_said:
        return []
    model = ModelConfig.from_path(args.model_path, **args.model_options())
    kv_dtype = resolve_kv_dtype(args.kv_cache_dtype, model.dtype)
    window_ratio = None if args.disable_hybrid_swa_memory else args.swa_full_tokens_ratio
    token_bytes = kv_bytes_per_token(model, args.tp_size, kv_dtype, window_ratio) * args.tp_size
    # A host pool of a fixed size is the user's; else it goes with the device pool.
    in_host = 0.0 if args.hicache_size else args.hicache_ratio or DEFAULT_RATIO
    share = min(SHARE_OF_FREE / num_replicas / (1 + in_host), CPU_DEFAULT_SHARE)
    num_tokens = int(free_bytes * share / token_bytes)
    num_tokens = min(num_tokens, CPU_DEFAULT_CONTEXTS * model.context_len)
    page_size = args.page_size or 1
    num_tokens = max(num_tokens // page_size, 1) * page_size
    return ["--max-total-tokens", str(num_tokens)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
