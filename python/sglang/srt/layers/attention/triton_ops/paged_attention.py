"""Launch the paged attention kernel: block sizes, how finely to share the keys, scratch memory.

Owns no state but the scratch memory of a `Workspace`, which belongs to one backend and may be used
from one stream at a time. Nothing here reads a device tensor, so every call can be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from sglang.srt.layers.attention.triton_ops.paged_attention_kernel import (
    merge_shares_kernel,
    paged_attention_kernel,
)
from sglang.srt.layers.triton_ops.device import num_multiprocessors, supports_early_launch

MAX_HEAD_DIM = 256
# The matrix unit's smallest tile has this many rows.
MIN_ROWS = 16
MAX_BATCH_SIZE = 4096
# Fewer keys than this are not worth a program of their own.
MIN_KEYS_PER_SHARE = 64
# New tokens a request, at most, that the kernel rotates and writes.
MAX_ROTATED_TOKENS = 16
# Elements of the shares' outputs that a merging program holds at once.
_MERGE_ELEMENTS = 8192
# The same where the merging program is one of the attention kernel, with fewer registers to spare.
_MERGE_HERE_ELEMENTS = 4096
# Where requests have several new tokens: elements of a row block, at most, that is merged so.
# Larger ones would take many rounds, or more registers than attention does.
_MERGE_HERE_BLOCK = 2048
# Elements of a block of keys, at most, beside which a multiprocessor has room for programs of the
# next kernel. Steps of a few requests: there the products around attention launch early themselves,
# and programs that come early to a multiprocessor that must be divided anew only delay it.
_SMALL_TILE = 8192
# Counters of a workspace; `share_target` times the number of KV heads may be as many.
MAX_SHARES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How one launch divides its work."""

    block_m: int  # rows (token, head of the group) a program
    block_n: int  # keys an iteration
    num_warps: int
    num_stages: int
    # Aim of key shares over all row blocks of one KV head; 0: every row block is one program.
    share_target: int
    # Launch while the kernel before is still at work, and the merging kernel likewise. Lengths and
    # table must be older than the kernel before. Hopper and later.
    early: bool = False
    # Let the kernel behind be launched while this one is at work, as `early` does too. Hopper and
    # later.
    early_next: bool = False
    # Where `query_lens` is None: mask every block of keys instead of taking the last ones in a
    # loop of their own.
    one_loop: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """What is still to be done about new tokens, n / b of each request (`MAX_ROTATED_TOKENS`).

    Queries and keys are rotated by `positions`, keys and values written to `slots` of the pool,
    which are those that the table has for the last places of each request (of a request shorter
    than n / b, the first tokens' are not written). Queries and these keys are left as they are.
    """

    keys: torch.Tensor  # [n, num_kv_heads, head_dim], rows may be strided
    values: torch.Tensor  # like keys
    positions: torch.Tensor  # int64 [n], the same as those of the inputs
    cos_sin: torch.Tensor  # float32 [positions, rotary_dim], as for `dispatch.Ops.apply_rope`
    slots: torch.Tensor  # int64 [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionInputs:
    """Arguments of `paged_attention`.

    n = new tokens of all requests, b = requests. Slots of a request's keys, those of its new
    tokens included, are in `table[table_rows[i], :seq_lens[i]]`.
    """

    queries: torch.Tensor  # [n, num_heads, head_dim], rows may be strided
    keys: torch.Tensor  # [slots, num_kv_heads, head_dim], any float type
    values: torch.Tensor  # like keys
    table: torch.Tensor  # int32 [rows, columns]
    table_rows: torch.Tensor  # int64 [b]
    seq_lens: torch.Tensor  # int64 [b], new tokens included
    # int64 [b]; None = as many new tokens each, n / b. Compiled for each such number.
    query_lens: torch.Tensor | None
    # bool [b, q, m], contiguous, as in `attention.base.TreeMaskInput`; n is b * q then.
    tree_mask: torch.Tensor | None
    scaling: float
    window: int | None
    # int32: row of keys and values for each slot; None: the slot itself.
    slot_map: torch.Tensor | None = None
    # int64 [n], of the new tokens in their sequences; a tree's within a window needs it.
    positions: torch.Tensor | None = None
    new: NewTokens | None = None  # None: the pool holds the new keys, and queries are rotated
    # Block sizes suit this many requests, where that is another number than b.
    likely_requests: int | None = None

    @property
    def equal_lens(self) -> int:
        """New tokens of every request; 0 where `query_lens` says how many each has."""
        batch_size = self.seq_lens.shape[0]
        if self.query_lens is not None or batch_size == 0:
            return 0
        return self.queries.shape[0] // batch_size

    @property
    def has_one_query(self) -> bool:
        """A decode step: every request has one new token, which sees all keys of its window."""
        return self.equal_lens == 1 and self.tree_mask is None


class Workspace:
    """Scratch memory of one backend: outputs and log-sum-exps of the shares of one launch.

    Grows when a launch needs more. Older memory is kept, since captured launches hold its address.
    `arrivals` int32 [MAX_SHARES] counts the shares that are done; every launch leaves zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.float32, device=device)]
        self.arrivals = torch.zeros(MAX_SHARES, dtype=torch.int32, device=device)

    def reserve(self, num_rows: int, block_d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 with room for [num_rows, block_d] and [num_rows]."""
        num_floats = num_rows * (block_d + 1)
        if self._memory[-1].numel() < num_floats:
            size = max(num_floats, 2 * self._memory[-1].numel())
            self._memory.append(torch.empty(size, dtype=torch.float32, device=self._device))
        return self._memory[-1], self._memory[-1][num_rows * block_d :]


def choose_config(inputs: PagedAttentionInputs) -> LaunchConfig:
    """Block sizes for a launch, from shapes alone."""
    num_tokens, num_heads, head_dim = inputs.queries.shape
    num_kv_heads = inputs.keys.shape[1]
    processors = num_multiprocessors(inputs.queries.device)
    num_requests = inputs.likely_requests or inputs.seq_lens.shape[0]
    mean_rows = math.ceil(num_tokens / num_requests) * (num_heads // num_kv_heads)
    wide = head_dim > 128 or inputs.queries.dtype == torch.float32
    block_m = min(max(triton.next_power_of_2(mean_rows), MIN_ROWS), 64 if wide else 128)
    num_blocks = _max_row_blocks(inputs, block_m, num_requests) * num_kv_heads
    is_few = num_blocks <= processors
    share_target = _share_target(num_kv_heads, 2 * processors)
    num_warps, num_stages, block_n = 8, 5, 64
    if wide:
        num_warps, num_stages, block_n = 4, 3, 32
    elif block_m <= 32 and is_few:
        num_warps = 4
        if block_m == MIN_ROWS and not inputs.has_one_query:
            num_warps, num_stages = 2, 4
        else:
            # One program a multiprocessor, with as much in flight as fits: fewer shares to merge.
            block_n = 128
            share_target = _share_target(num_kv_heads, processors)
    elif block_m == MIN_ROWS and num_blocks >= 6 * processors:
        # More programs than find room at once: the smallest, which leave it soonest.
        block_n, num_warps, num_stages = 32, 1, 3
    elif block_m == MIN_ROWS:
        num_warps, num_stages = 2, 3
    elif block_m <= 64:
        num_warps = 4
    elif num_blocks >= 4 * processors:
        share_target = 0
    early = supports_early_launch(inputs.queries.device)
    is_short_step = inputs.has_one_query and is_few
    return LaunchConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        share_target=share_target,
        early=early and not is_short_step,
        early_next=early and (not is_short_step or block_n * head_dim <= _SMALL_TILE),
        one_loop=inputs.has_one_query,
    )


def _share_target(num_kv_heads: int, num_programs: int) -> int:
    return max(1, num_programs // num_kv_heads)


def _max_row_blocks(inputs: PagedAttentionInputs, block_m: int, num_requests: int) -> int:
    """Row blocks a KV head; at most, where the device only knows the requests' lengths.

    `num_requests`: those with new tokens.
    """
    num_tokens, num_heads, _ = inputs.queries.shape
    group = num_heads // inputs.keys.shape[1]
    if inputs.query_lens is None:
        return num_requests * math.ceil(inputs.equal_lens * group / block_m)
    return num_tokens * group // block_m + num_requests


def paged_attention(
    inputs: PagedAttentionInputs, workspace: Workspace, config: LaunchConfig | None = None
) -> torch.Tensor:
    """Attention of new tokens over their requests' keys: [n, num_heads, head_dim], like queries.

    Causal among the new tokens unless there is a tree mask. A request without keys gets zeros.
    Raises ValueError for shapes that the kernel does not do.
    """
    _check(inputs)
    out = torch.empty_like(inputs.queries, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    config = config or choose_config(inputs)
    if config.share_target * inputs.keys.shape[1] > MAX_SHARES:
        raise ValueError(f"{config.share_target} shares are too many, over all KV heads")
    _launch(inputs, out, workspace, config)
    return out


def _launch(
    inputs: PagedAttentionInputs, out: torch.Tensor, workspace: Workspace, config: LaunchConfig
) -> None:
    queries, keys, values, tree_mask = inputs.queries, inputs.keys, inputs.values, inputs.tree_mask
    num_kv_heads = keys.shape[1]
    batch_size = inputs.seq_lens.shape[0]
    sizes = _shared_sizes(inputs, config)
    num_items = _max_row_blocks(inputs, config.block_m, batch_size)
    is_shared = config.share_target > 0
    if is_shared:
        num_items += config.share_target - 1
    partial = workspace.reserve(
        num_items * num_kv_heads * config.block_m if is_shared else 0, sizes["BLOCK_D"]
    )
    new = inputs.new or _no_new_tokens(inputs, partial[1])
    merge = _merge_sizes(inputs, config, sizes["BLOCK_D"])
    one_loop = config.one_loop and inputs.equal_lens > 0
    paged_attention_kernel[(num_kv_heads, num_items)](
        queries,
        out,
        keys,
        values,
        inputs.table,
        inputs.table_rows,
        inputs.table if inputs.slot_map is None else inputs.slot_map,
        inputs.seq_lens,
        _query_lens(inputs),
        queries if tree_mask is None else tree_mask.view(torch.uint8),
        *partial,
        workspace.arrivals,
        new.keys,
        new.values,
        new.positions,
        new.cos_sin,
        new.slots,
        batch_size,
        config.share_target,
        _min_share(config),
        inputs.table.stride(0),
        0 if tree_mask is None else tree_mask.shape[2],
        queries.stride(0),
        out.stride(0),
        keys.stride(0),
        values.stride(0),
        new.keys.stride(0),
        new.values.stride(0),
        new.cos_sin.stride(0),
        inputs.scaling * math.log2(math.e),
        HALF=0 if inputs.new is None else new.cos_sin.shape[1] // 2,
        NEW_BLOCK=1 if inputs.new is None else triton.next_power_of_2(inputs.equal_lens),
        BLOCK_N=config.block_n,
        TREE=tree_mask is not None,
        MAPPED=inputs.slot_map is not None,
        SHARED=is_shared,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        ONE_LOOP=one_loop,
        # Else the masked loop is a block or two: not worth the registers of a pipeline.
        MASKED_STAGES=config.num_stages if one_loop or inputs.window else 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_early(config),
        **sizes,
        **merge,
    )
    if is_shared and not merge["MERGE_HERE"]:
        _launch_merge(inputs, out, partial, config, sizes)


def _launch_merge(
    inputs: PagedAttentionInputs,
    out: torch.Tensor,
    partial: tuple[torch.Tensor, torch.Tensor],
    config: LaunchConfig,
    sizes: dict[str, int],
) -> None:
    """Merge the shares `partial` by a kernel of its own."""
    group_block = triton.next_power_of_2(sizes["GROUP"])
    merge_shares_kernel[(sizes["NUM_KV_HEADS"], out.shape[0])](
        out,
        inputs.seq_lens,
        _query_lens(inputs),
        *partial,
        inputs.seq_lens.shape[0],
        config.share_target,
        _min_share(config),
        out.stride(0),
        GROUP_BLOCK=group_block,
        MERGE_SHARES=max(1, _MERGE_ELEMENTS // (group_block * sizes["BLOCK_D"])),
        num_warps=4,
        **_early(config),
        **sizes,
    )


def _shared_sizes(inputs: PagedAttentionInputs, config: LaunchConfig) -> dict[str, int]:
    """Constants of both kernels."""
    _, num_heads, head_dim = inputs.queries.shape
    num_kv_heads = inputs.keys.shape[1]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_M": config.block_m,
        "BATCH_BLOCK": batch_block(inputs.seq_lens.shape[0]),
        "WINDOW": inputs.window or 0,
        "QUERIES": inputs.equal_lens,
        "PDL": config.early or config.early_next,
    }


def _early(config: LaunchConfig) -> dict[str, bool]:
    return {"launch_pdl": True} if config.early else {}


def _query_lens(inputs: PagedAttentionInputs) -> torch.Tensor:
    """In the place of lengths that nobody reads: any."""
    return inputs.seq_lens if inputs.query_lens is None else inputs.query_lens


def _min_share(config: LaunchConfig) -> int:
    return max(MIN_KEYS_PER_SHARE, config.block_n)


def _no_new_tokens(inputs: PagedAttentionInputs, any_floats: torch.Tensor) -> NewTokens:
    """Arguments in the place of new tokens: only `positions` are read, where there are some."""
    return NewTokens(
        keys=inputs.queries,
        values=inputs.queries,
        positions=inputs.seq_lens if inputs.positions is None else inputs.positions,
        cos_sin=any_floats,
        slots=inputs.seq_lens,
    )


def _merge_sizes(
    inputs: PagedAttentionInputs, config: LaunchConfig, block_d: int
) -> dict[str, int]:
    """Whether and how the attention kernel merges the shares itself: its constants."""
    rows, here, elements = config.block_m, config.share_target > 0, _MERGE_HERE_ELEMENTS
    if not inputs.has_one_query:
        here = here and rows * block_d <= _MERGE_HERE_BLOCK
        # Programs of few warps share a multiprocessor with many others, and so its registers.
        elements = 8192 if config.num_warps >= 4 else 1024 * config.num_warps
    if inputs.query_lens is None:
        group = inputs.queries.shape[1] // inputs.keys.shape[1]
        rows = min(triton.next_power_of_2(inputs.equal_lens * group), rows)
    shares = max(1, elements // (rows * block_d))
    return {"MERGE_HERE": here, "MERGE_ROWS": rows, "MERGE_SHARES": shares}


def batch_block(batch_size: int) -> int:
    """`BATCH_BLOCK` of a kernel: few sizes, since each is compiled on its own: 1, 8, 64, 512 ..."""
    size = 1
    while size < batch_size:
        size *= 8
    return size


def check_new_tokens(
    mask: torch.Tensor | None,
    query_lens: torch.Tensor | None,
    num_tokens: int,
    batch_size: int,
    most_equal: int = 1,
) -> None:
    """Raise ValueError where new tokens, their lengths and a tree mask do not fit each other.

    `most_equal`: new tokens of a request, at most, where there are no lengths.
    """
    if mask is not None and (
        mask.dim() != 3
        or mask.shape[0] != batch_size
        or batch_size * mask.shape[1] != num_tokens
        or not mask.is_contiguous()
    ):
        raise ValueError(
            f"a tree mask {tuple(mask.shape)} does not fit {num_tokens} new tokens of "
            f"{batch_size} requests"
        )
    if query_lens is None and (
        num_tokens > most_equal * batch_size or (num_tokens and num_tokens % batch_size)
    ):
        raise ValueError(f"{num_tokens} tokens of {batch_size} requests need query_lens")


def _check(inputs: PagedAttentionInputs) -> None:
    queries, keys, values = inputs.queries, inputs.keys, inputs.values
    num_tokens, num_heads, head_dim = queries.shape
    batch_size = inputs.seq_lens.shape[0]
    if keys.shape != values.shape or keys.shape[2] != head_dim or num_heads % keys.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)} and values "
            f"{tuple(values.shape)} do not fit"
        )
    if head_dim > MAX_HEAD_DIM or batch_size > MAX_BATCH_SIZE:
        raise ValueError(
            f"head size {head_dim} or batch size {batch_size} exceeds "
            f"{MAX_HEAD_DIM} and {MAX_BATCH_SIZE}"
        )
    check_new_tokens(
        inputs.tree_mask, inputs.query_lens, num_tokens, batch_size, most_equal=num_tokens
    )
    tensors = [("queries", queries), ("keys", keys), ("values", values)]
    if inputs.new is not None:
        if not 0 < inputs.equal_lens <= MAX_ROTATED_TOKENS:
            raise ValueError(
                f"only equally many new tokens of all requests, up to {MAX_ROTATED_TOKENS} each, "
                "are rotated here"
            )
        tensors += [("new keys", inputs.new.keys), ("new values", inputs.new.values)]
    for name, tensor in tensors:
        if tensor.stride(2) != 1 or tensor.stride(1) != head_dim:
            raise ValueError(f"the heads of {name} must lie side by side")
    if inputs.tree_mask is not None and inputs.window and inputs.positions is None:
        raise ValueError("a tree within a window needs the positions of its tokens")
    if inputs.scaling <= 0:
        raise ValueError(f"the scale must be positive, not {inputs.scaling}")
