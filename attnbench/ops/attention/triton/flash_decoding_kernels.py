"""Kernels of flash_decoding.py."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.layers.triton.rotary_kernels import load_rows, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, because the difference of two infinities is NaN. Beside any other score its weight is 0.
MASKED_SCORE = tl.constexpr(-1e30)


@triton.jit
def _own_keys(position, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    stop = tl.load(position).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, stop - WINDOW)
    num_blocks, split = tl.cdiv(stop - first, KEYS), tl.program_id(1)
    own_first = first + split * num_blocks // SPLITS * KEYS
    own_stop = first + (split + 1) * num_blocks // SPLITS * KEYS
    return own_first, tl.minimum(own_stop, stop)


@triton.jit
def _forget(address, inside, is_newest, newest_gate):
    """Add the newest gate to the sums at `address`, which start at 0; return the result in units of log2."""
    bias = tl.where(is_newest, 0.0, tl.load(address, mask=inside, other=0.0) + newest_gate)
    tl.store(address, bias, mask=inside)
    return bias * LOG2_E


# In the two kernels below, tensors (B, S, G, K) have a tuple of their strides along B, S and G, the query along B and
# H. With FORGETS, `log_forget` is (B, H) and `bias` (B, S, H) with a stride along B.


@triton.jit
def single_kernel(
    query, query_strides, key, key_strides, value, value_strides, log_forget, bias, bias_stride, position,
    mixed, largest, total, scale,
    FORGETS: tl.constexpr, HEADS: tl.constexpr, SHARED_BY: tl.constexpr, MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Decode a query head that shares its keys with no other, without matrix units. Each row of a block has its own
    largest score and sums, combined after the last block, so that threads need not communicate."""
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    key += batch * key_strides[0] + head * key_strides[2]
    value += batch * value_strides[0] + head * value_strides[2]
    channel = tl.arange(0, PADDED)
    query += batch * query_strides[0] + head * query_strides[1] + channel
    query_row = tl.load(query, mask=channel < WIDTH, other=0.0).to(tl.float32) * (scale * LOG2_E)
    start, stop = _own_keys(position, WINDOW, SPLITS, KEYS)
    if FORGETS:
        newest, newest_gate = tl.load(position), tl.load(log_forget + sequence)
        bias += batch * bias_stride + head
    accumulated = tl.zeros([KEYS, PADDED], tl.float32)
    row_total = tl.zeros([KEYS], tl.float32)
    row_largest = tl.full([KEYS], MASKED_SCORE, tl.float32)
    for first_key in tl.range(start, stop, KEYS, num_stages=STAGES):
        key_position = first_key + tl.arange(0, KEYS)
        key_tile = load_rows(key, key_strides[1], key_position, stop, WIDTH, PADDED, True)
        value_tile = load_rows(value, value_strides[1], key_position, stop, WIDTH, PADDED, True)
        score = tl.sum(key_tile.to(tl.float32) * query_row[None, :], 1)
        if FORGETS:
            address, inside = bias + key_position.to(tl.int64) * HEADS, key_position < stop
            score += _forget(address, inside, key_position == newest, newest_gate)
        score = tl.where(key_position < stop, score, MASKED_SCORE)
        new_largest = tl.maximum(row_largest, score)
        weight, correction = tl.exp2(score - new_largest), tl.exp2(row_largest - new_largest)
        row_total = row_total * correction + weight
        accumulated = accumulated * correction[:, None] + weight[:, None] * value_tile.to(tl.float32)
        row_largest = new_largest
    own_largest = tl.max(row_largest, 0)
    # A row without keys has summed masked scores; beside other rows it weighs 0.
    correction = tl.exp2(row_largest - own_largest)
    own_total = tl.sum(row_total * correction, 0)
    own_mixed = tl.sum(accumulated * correction[:, None], 0)
    if SPLITS == 1:
        own_mixed /= own_total
    row = sequence * SPLITS + tl.program_id(1)
    tl.store(mixed + row * WIDTH + channel, own_mixed.to(mixed.dtype.element_ty), mask=channel < WIDTH)
    if SPLITS > 1:
        tl.store(largest + row, own_largest)
        tl.store(total + row, own_total)


@triton.jit
def grouped_kernel(
    query, query_strides, key, key_strides, value, value_strides, log_forget, bias, bias_stride, position,
    mixed, largest, total, scale,
    FORGETS: tl.constexpr, HEADS: tl.constexpr, SHARED_BY: tl.constexpr, MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Decode all query heads of one key/value head, as the rows of a matrix product; MEMBERS pads them to 16."""
    sequence = tl.program_id(0).to(tl.int64)
    batch, group = sequence // (HEADS // SHARED_BY), sequence % (HEADS // SHARED_BY)
    key += batch * key_strides[0] + group * key_strides[2]
    value += batch * value_strides[0] + group * value_strides[2]
    query += batch * query_strides[0] + group * SHARED_BY * query_strides[1]
    member = tl.arange(0, MEMBERS)
    query_tile = load_rows(query, query_strides[1], member, SHARED_BY, WIDTH, PADDED, True)
    start, stop = _own_keys(position, WINDOW, SPLITS, KEYS)
    if FORGETS:
        newest, first_head = tl.load(position), group * SHARED_BY
        newest_gate = tl.load(log_forget + batch * HEADS + first_head + member, mask=member < SHARED_BY, other=0.0)
        bias += batch * bias_stride + first_head + member[:, None]
    accumulated = tl.zeros([MEMBERS, PADDED], tl.float32)
    own_total = tl.zeros([MEMBERS], tl.float32)
    own_largest = tl.full([MEMBERS], MASKED_SCORE, tl.float32)
    for first_key in tl.range(start, stop, KEYS, num_stages=STAGES):
        key_position = first_key + tl.arange(0, KEYS)
        key_tile = load_rows(key, key_strides[1], key_position, stop, WIDTH, PADDED, True)
        value_tile = load_rows(value, value_strides[1], key_position, stop, WIDTH, PADDED, True)
        score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION) * (scale * LOG2_E)
        if FORGETS:
            address = bias + key_position.to(tl.int64)[None, :] * HEADS
            inside = (member[:, None] < SHARED_BY) & (key_position[None, :] < stop)
            score += _forget(address, inside, key_position[None, :] == newest, newest_gate[:, None])
        score = tl.where(key_position[None, :] < stop, score, MASKED_SCORE)
        new_largest = tl.maximum(own_largest, tl.max(score, 1))
        weight, correction = tl.exp2(score - new_largest[:, None]), tl.exp2(own_largest - new_largest)
        own_total = own_total * correction + tl.sum(weight, 1)
        accumulated = tl.dot(
            weight.to(value_tile.dtype), value_tile, accumulated * correction[:, None], input_precision=PRECISION
        )
        own_largest = new_largest
    if SPLITS == 1:
        accumulated /= own_total[:, None]
    row = sequence * SHARED_BY * SPLITS + tl.program_id(1)
    store_rows(mixed + row * WIDTH, SPLITS * WIDTH, member, SHARED_BY, accumulated, WIDTH, PADDED)
    if SPLITS > 1:
        tl.store(largest + row + member * SPLITS, own_largest, mask=member < SHARED_BY)
        tl.store(total + row + member * SPLITS, own_total, mask=member < SHARED_BY)


@triton.jit
def combine_kernel(
    partial, largest, total, mixed,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64) * SPLITS, tl.arange(0, PADDED_SPLITS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    own_largest = tl.load(largest + row + split, mask=split < SPLITS, other=MASKED_SCORE)
    own_total = tl.load(total + row + split, mask=split < SPLITS, other=0.0)
    correction = tl.exp2(own_largest - tl.max(own_largest, 0))
    inside = (split[:, None] < SPLITS) & (channel[None, :] < WIDTH)
    own_mixed = tl.load(partial + (row + split)[:, None] * WIDTH + channel[None, :], mask=inside, other=0.0)
    combined = tl.sum(own_mixed * correction[:, None], 0) / tl.sum(own_total * correction, 0)
    mixed += tl.program_id(0).to(tl.int64) * WIDTH + channel
    tl.store(mixed, combined.to(mixed.dtype.element_ty), mask=channel < WIDTH)
