"""Process groups beside the server's own, for trainers that send weights.

Documented import name: `sglang.srt.utils.init_custom_process_group`. The steps, the key prefix in
the store and the group's name are an agreement with the trainers, who join with a routine of the
same shape; another order makes both sides wait for each other.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def init_custom_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: c10d.Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> c10d.ProcessGroup:
    """Join a group that is independent of the default one. Blocks until all members joined.

    Either `store` with `rank` and `world_size`, or `init_method` (a URL such as
    "tcp://host:port"). Raises ValueError for arguments that contradict each other, and what
    torch.distributed raises where the rendezvous fails or takes longer than `timeout`.
    """
    if store is not None and init_method is not None:
        raise ValueError("give init_method or store, not both")
    if store is not None and (world_size <= 0 or rank < 0):
        raise ValueError("a store needs world_size and rank")
    timeout = c10d.default_pg_timeout if timeout is None else timeout
    if store is None:
        url = init_method or "env://"
        rendezvous = c10d.rendezvous(url, rank, world_size, timeout=timeout)
        store, rank, world_size = next(iter(rendezvous))
        store.set_timeout(timeout)
    prefixed = c10d.PrefixStore(group_name, store)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend) if backend else c10d.Backend("undefined"),
        prefixed,
        group_name=c10d.GroupName(group_name),
        backend_options=pg_options,
        timeout=timeout,
        device_id=device_id,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group
