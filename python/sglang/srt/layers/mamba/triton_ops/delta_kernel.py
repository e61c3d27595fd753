"""The gated delta rule: one token of every request, or a scan over each request's tokens.

See `layers.mamba.ops` for the recurrence and its sources. A program owns some columns of one
head's state, which never leave its registers between the tokens; columns do not depend on each
other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), which is x to all digits where exp(x) is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def delta_step_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    log_rate: tl.tensor,
    dt_bias: tl.tensor,
    source: tl.tensor,
    source_slots: tl.tensor,
    target: tl.tensor,
    target_slots: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    unit_eps: tl.tensor,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program: one request, one value head, `COLUMNS` of its state's columns.

    Strides are of tokens; heads follow each other. `group`: value heads that share a key.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_row, in_column = row < key_dim, column < value_dim
    of_key = head // group * key_dim + row
    q = tl.load(query + request * query_stride + of_key, mask=in_row, other=0.0).to(tl.float32)
    k = tl.load(key + request * key_stride + of_key, mask=in_row, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + unit_eps) * tl.rsqrt(key_dim.to(tl.float32))
    k *= tl.rsqrt(tl.sum(k * k, 0) + unit_eps)
    of_value = head * value_dim + column
    v = tl.load(value + request * value_stride + of_value, mask=in_column, other=0.0)
    rate = tl.exp(tl.load(log_rate + head).to(tl.float32))
    opening = tl.load(a + request * a_stride + head).to(tl.float32)
    opening += tl.load(dt_bias + head).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + request * b_stride + head).to(tl.float32))

    head_size = key_dim * value_dim
    cell = head * head_size + row[:, None] * value_dim + column[None, :]
    inside = in_row[:, None] & in_column[None, :]
    old = source + tl.load(source_slots + request) * (num_heads * head_size) + cell
    state = tl.load(old, mask=inside, other=0.0) * tl.exp(-rate * _softplus(opening))
    change = (v.to(tl.float32) - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * change[None, :]
    new = target + tl.load(target_slots + request) * (num_heads * head_size) + cell
    tl.store(new, state, mask=inside)
    result = tl.sum(q[:, None] * state, 0)
    of_out = (request * num_heads + head) * value_dim + column
    tl.store(out + of_out, result.to(out.dtype.element_ty), mask=in_column)


@triton.jit
def _unit_factors(x: tl.tensor, unit_eps: tl.tensor) -> tl.tensor:
    """What brings each row to unit length."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + unit_eps)


@triton.jit
def _solve(system: tl.tensor, wanted: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """x with (1 + system) x = wanted, `system` strictly lower triangular: row after row.

    Not by powers of the matrix: where keys repeat they grow beyond what float32 can cancel.
    """
    row = tl.arange(0, CHUNK)[:, None]
    for index in range(1, CHUNK):
        factors = tl.sum(tl.where(row == index, system, 0.0), 0)
        known = tl.sum(factors[:, None] * wanted, 0)
        wanted = tl.where(row == index, wanted - known[None, :], wanted)
    return wanted


@triton.jit
def delta_scan_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    betas: tl.tensor,
    states: tl.tensor,
    sources: tl.tensor,
    slots: tl.tensor,
    chunk_table: tl.tensor,
    chunk_starts: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    num_chunks: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    unit_eps: tl.tensor,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A program: one request, one value head, `COLUMNS` of its state's columns; see `ScanChunk`.

    `decay`, `betas`: float32 [n, num_heads]. `chunk_table` [3, num_chunks]: begin, end, slot.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.arange(0, CHUNK)
    row = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_row, in_column = row < key_dim, column < value_dim
    in_state = in_row[:, None] & in_column[None, :]
    cell = row[:, None] * value_dim + column[None, :]
    head_size = key_dim * value_dim
    source = (tl.load(sources + request) * num_heads + head) * head_size
    state = tl.load(states + source + cell, mask=in_state, other=0.0)

    first = tl.load(chunk_starts + request)
    last = tl.load(chunk_starts + request + 1)
    for chunk in range(first, last):
        begin = tl.load(chunk_table + chunk)
        at = begin + token
        inside = at < tl.load(chunk_table + num_chunks + chunk)
        of_key = head // group * key_dim + row[None, :]
        in_keys = inside[:, None] & in_row[None, :]
        q = tl.load(query + at[:, None] * query_stride + of_key, mask=in_keys, other=0.0)
        k = tl.load(key + at[:, None] * key_stride + of_key, mask=in_keys, other=0.0)
        # Products are made of q and k as they are, in their own type, and scaled afterwards.
        q_unit = _unit_factors(q, unit_eps) * tl.rsqrt(key_dim.to(tl.float32))
        k_unit = _unit_factors(k, unit_eps)
        in_values = inside[:, None] & in_column[None, :]
        of_value = head * value_dim + column[None, :]
        v = tl.load(value + at[:, None] * value_stride + of_value, mask=in_values, other=0.0)
        gate = at * num_heads + head
        steps = tl.load(decay + gate, mask=inside, other=0.0)
        beta = tl.load(betas + gate, mask=inside, other=0.0)

        total = tl.cumsum(steps, 0)
        # Above the diagonal the difference is positive and of no use.
        apart = tl.minimum(total[:, None] - total[None, :], 0.0)
        since = tl.where(token[:, None] >= token[None, :], tl.exp(apart), 0.0)
        keys_across = tl.trans(k)
        product = tl.dot(k, keys_across, input_precision=PRECISION)
        product *= (beta * k_unit)[:, None] * k_unit[None, :] * since
        system = tl.where(token[:, None] > token[None, :], product, 0.0)
        reach = tl.exp(total)
        stored = tl.dot(k.to(tl.float32), state, input_precision=PRECISION)
        wanted = v.to(tl.float32) - (reach * k_unit)[:, None] * stored
        change = _solve(system, beta[:, None] * wanted, CHUNK)
        weights = tl.dot(q, keys_across, input_precision=PRECISION)
        weights *= q_unit[:, None] * k_unit[None, :] * since
        result = tl.dot(q.to(tl.float32), state, input_precision=PRECISION)
        result *= (reach * q_unit)[:, None]
        result += tl.dot(weights, change, input_precision=PRECISION)
        cells = out + gate[:, None] * value_dim + column[None, :]
        tl.store(cells, result.to(out.dtype.element_ty), mask=in_values)

        whole = tl.sum(steps, 0)
        change *= (tl.exp(whole - total) * k_unit)[:, None]
        state *= tl.exp(whole)
        state += tl.dot(keys_across.to(tl.float32), change, input_precision=PRECISION)
        slot = tl.load(chunk_table + 2 * num_chunks + chunk)
        kept = states + (slot * num_heads + head) * head_size + cell
        tl.store(kept, state, mask=in_state & (slot != 0))
    own = (tl.load(slots + request) * num_heads + head) * head_size
    tl.store(states + own + cell, state, mask=in_state)
