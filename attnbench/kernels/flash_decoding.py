"""Attention of one new position over a cache, the cache cut into pieces that are read side by side (Dao et al., 2023).

    y = sum_s p_s v_s,   p_s = exp(c q . k_s) / sum_r exp(c q . k_r),   c = 1 / sqrt(K)

over the positions s that are filled. With one query there is nothing to compute but one pass over keys and values: it
takes as long as the memory does, if enough of it is asked for at a time. Where sequences and heads are fewer than the
multiprocessors, one program each is too few for that: it takes one of several splits of the keys and leaves their
largest score, the sum of exponentials under it and the sum of values that these weigh, all in float32. A second, small
kernel makes one sum of the splits.

How many positions are filled is read on the device, by the kernel: a captured CUDA graph decodes at every position.
Splits are equal parts of what is filled, so that all of them work however full the cache is; while fewer blocks of keys
are filled than there are splits, some are empty and weigh nothing.
"""

# Launching a kernel gives plain numbers for its constexpr arguments.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.launching import num_multiprocessors
from attnbench.kernels.products import float32_product
from attnbench.kernels.rotary import load_rows, padded_width, store_rows

MAX_WIDTH = 256
"""Channels a head. A width that is no power of two is computed as the next one, the rest masked."""

MAX_SPLITS = 128
PROGRAMS = 4
"""Programs a multiprocessor that the number of splits aims at, and that fit there at once: with fewer too little is
asked of the memory at a time, with more some wait for others to end."""

LOG2_E = tl.constexpr(1.4426950408889634)
# A masked score. Finite, because the difference of two infinities is no number; beside any other score it weighs 0.
MASKED_SCORE = tl.constexpr(-1e30)


class Tiles(NamedTuple):
    """Cut of the first kernel: the speed, not the result beyond rounding."""

    keys: int
    num_warps: int
    num_stages: int


def tiles_for(dtype: torch.dtype, width: int) -> Tiles:
    """Blocks of up to 8 KiB of keys and as much of values, three of each on their way at a time: PROGRAMS programs then
    fit a multiprocessor's shared memory, and their sums its registers."""
    row_bytes = padded_width(width) * dtype.itemsize
    return Tiles(min(64, max(16, 8192 // row_bytes)), 4, 4)


def splits_for(num_keys: int, num_sequences: int, num_multiprocessors: int, keys: int = 64) -> int:
    """Return as many as make no more than PROGRAMS programs a multiprocessor and leave each a block of keys; 1: whole.

    Whole too where every multiprocessor has a program already: 256 sequences in parts took 2 to 23 % longer on 132.

    Args:
        num_keys: that the cache has room for, or that a window shows.
        num_sequences: batch × key/value heads: the programs that there are without splitting.
        keys: of a block.
    """
    if num_sequences == 0 or num_sequences >= num_multiprocessors:
        return 1
    wanted = PROGRAMS * num_multiprocessors // num_sequences
    return max(1, min(wanted, -(-num_keys // keys), MAX_SPLITS))


@triton.jit
def _own_keys(position, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """The first key of this program's split and the end of them, in blocks shared out as equally as they can be."""
    stop = tl.load(position).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, stop - WINDOW)
    num_blocks, split = tl.cdiv(stop - first, KEYS), tl.program_id(1)
    own_first = first + split * num_blocks // SPLITS * KEYS
    own_stop = first + (split + 1) * num_blocks // SPLITS * KEYS
    return own_first, tl.minimum(own_stop, stop)


# In the two kernels below a tensor of (B, S, G, K) comes with its strides along B, S and G as a tuple, the query with
# those along B and H.


@triton.jit
def _single_kernel(
    query, query_strides, key, key_strides, value, value_strides, position, mixed, largest, total, scale,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, MEMBERS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query head that shares its keys with no other: nothing for matrix units, and no word between threads.

    Each row of a block keeps a largest score and sums of its own. They meet after the last block.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    key += batch * key_strides[0] + head * key_strides[2]
    value += batch * value_strides[0] + head * value_strides[2]
    channel = tl.arange(0, PADDED)
    query += batch * query_strides[0] + head * query_strides[1] + channel
    query_row = tl.load(query, mask=channel < WIDTH, other=0.0).to(tl.float32) * (scale * LOG2_E)
    start, stop = _own_keys(position, WINDOW, SPLITS, KEYS)
    accumulated = tl.zeros([KEYS, PADDED], tl.float32)
    row_total = tl.zeros([KEYS], tl.float32)
    row_largest = tl.full([KEYS], MASKED_SCORE, tl.float32)
    for first_key in tl.range(start, stop, KEYS, num_stages=STAGES):
        key_position = first_key + tl.arange(0, KEYS)
        key_tile = load_rows(key, key_strides[1], key_position, stop, WIDTH, PADDED, True)
        value_tile = load_rows(value, value_strides[1], key_position, stop, WIDTH, PADDED, True)
        score = tl.sum(key_tile.to(tl.float32) * query_row[None, :], 1)
        score = tl.where(key_position < stop, score, MASKED_SCORE)
        new_largest = tl.maximum(row_largest, score)
        weight, correction = tl.exp2(score - new_largest), tl.exp2(row_largest - new_largest)
        row_total = row_total * correction + weight
        accumulated = accumulated * correction[:, None] + weight[:, None] * value_tile.to(tl.float32)
        row_largest = new_largest
    own_largest = tl.max(row_largest, 0)
    # A row that saw no key has summed up masked scores; among rows that saw one it weighs 0.
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
def _grouped_kernel(
    query, query_strides, key, key_strides, value, value_strides, position, mixed, largest, total, scale,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, MEMBERS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All query heads that share one key/value head, as the rows of a matrix product; MEMBERS pads them to 16."""
    sequence = tl.program_id(0).to(tl.int64)
    batch, group = sequence // (HEADS // SHARED_BY), sequence % (HEADS // SHARED_BY)
    key += batch * key_strides[0] + group * key_strides[2]
    value += batch * value_strides[0] + group * value_strides[2]
    query += batch * query_strides[0] + group * SHARED_BY * query_strides[1]
    member = tl.arange(0, MEMBERS)
    query_tile = load_rows(query, query_strides[1], member, SHARED_BY, WIDTH, PADDED, True)
    start, stop = _own_keys(position, WINDOW, SPLITS, KEYS)
    accumulated = tl.zeros([MEMBERS, PADDED], tl.float32)
    own_total = tl.zeros([MEMBERS], tl.float32)
    own_largest = tl.full([MEMBERS], MASKED_SCORE, tl.float32)
    for first_key in tl.range(start, stop, KEYS, num_stages=STAGES):
        key_position = first_key + tl.arange(0, KEYS)
        key_tile = load_rows(key, key_strides[1], key_position, stop, WIDTH, PADDED, True)
        value_tile = load_rows(value, value_strides[1], key_position, stop, WIDTH, PADDED, True)
        score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION) * (scale * LOG2_E)
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
def _combine_kernel(
    partial, largest, total, mixed,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Some channels of one sequence and head: the splits' sums of values, brought under one largest score."""
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


def _decode(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, window: int, splits: int, tiles: Tiles, grouped: bool
) -> Tensor:
    """(B, H, K), contiguous; `window` 0 for none. Tiles and kernel change the speed, not the result beyond rounding."""
    (B, H, K), G = query.shape, key.shape[2]
    mixed = query.new_empty(query.shape)
    partial = mixed if splits == 1 else query.new_empty((B, H, splits, K), dtype=torch.float32)
    largest = total = partial
    if splits > 1:
        largest, total = query.new_empty((2, B, H, splits), dtype=torch.float32)
    kernel: Any = _grouped_kernel if grouped else _single_kernel
    with torch.cuda.device_of(query):
        kernel[(B * G, splits)](
            *(query, query.stride()[:2], key, key.stride()[:3], value, value.stride()[:3], position),
            *(partial, largest, total, K**-0.5),
            HEADS=H,
            SHARED_BY=H // G,
            MEMBERS=max(16, triton.next_power_of_2(H // G)),
            WIDTH=K,
            PADDED=padded_width(K),
            WINDOW=window,
            SPLITS=splits,
            KEYS=tiles.keys,
            STAGES=tiles.num_stages,
            PRECISION=float32_product(),
            num_warps=tiles.num_warps,
        )
        if splits > 1:
            channels = min(32, padded_width(K))
            _combine_kernel[(B * H, -(-K // channels))](
                *(partial, largest, total, mixed),
                WIDTH=K,
                CHANNELS=channels,
                SPLITS=splits,
                PADDED_SPLITS=triton.next_power_of_2(splits),
            )
    return mixed


def _check(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> None:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"query has {query.dtype}: float32, bfloat16 and float16 are what this kernel has")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if query.shape[2] > MAX_WIDTH:
        raise ValueError(f"{query.shape[2]} channels a head: {MAX_WIDTH} are the most")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or query.shape[1] % key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise ValueError("channels of query, key and value must lie side by side")
    if position.dim() or position.dtype != torch.int64 or position.device != query.device:
        raise ValueError("position must be one int64 number on the device of the query")


@torch.library.custom_op("attnbench::flash_decoding", mutates_args=())
def _flash_decoding(
    query_BHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, position: Tensor, window: int, splits: int
) -> Tensor:
    _check(query_BHK, key_BSGK, value_BSGK, position)
    (_, H, K), G = query_BHK.shape, key_BSGK.shape[2]
    tiles = tiles_for(query_BHK.dtype, K)
    return _decode(query_BHK, key_BSGK, value_BSGK, position, window, splits, tiles, H > G)


@_flash_decoding.register_fake
def _(query_BHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, position: Tensor, window: int, splits: int) -> Tensor:
    return query_BHK.new_empty(query_BHK.shape)


def flash_decoding(
    query_BHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    position: Tensor,
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of H query heads, one position each, over a cache of G key/value heads shared by H / G; (B, H, K).

    It has no gradient.

    Args:
        key_BSGK: with room for S positions; what lies behind `position` is not read.
        position: of the query, whose own key is the last it sees: an int64 scalar on the device, below S.
        window: of what it sees, the last so many, its own position included; None for all.
        splits: parts that the cache is read in, 1 for whole; None for as many as `splits_for` gives. Changes the speed,
            not the result beyond rounding.

    Raises:
        ValueError: shapes that do not fit, a window or a number of splits below 1.
    """
    B, S, G, K = key_BSGK.shape
    if window is not None and window < 1:
        raise ValueError(f"a window of {window}: must be at least 1")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits: must be 1 to {MAX_SPLITS}")
    if splits is None:
        keys = tiles_for(query_BHK.dtype, K).keys
        splits = splits_for(min(S, window or S), B * G, num_multiprocessors(query_BHK.device), keys)
    return _flash_decoding(query_BHK, key_BSGK, value_BSGK, position, window or 0, splits)
