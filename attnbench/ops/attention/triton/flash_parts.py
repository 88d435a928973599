"""Splitting of FlashAttention's walks into parts, and combination of the parts: float32 tensors shaped like the result,
one after the other along the first axis."""

# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.layers.triton.rotary_kernels import store_rows

WARPS_IN_FLOAT32, WARPS = 16, 8
"""Target warps per multiprocessor, from timings on an H200; walks are split if there are at most half as many."""

MAX_SPLITS = 32

NUMBERS_AT_ONCE = 4096
"""Numbers per program that combines parts."""

LOG2_E = tl.constexpr(1.4426950408889634)
# Scaled, and finite, because the difference of two infinities is NaN; sums over fully masked blocks are multiplied by 0
# at a row's first visible score.
MASKED_SCORE = tl.constexpr(-1e30)

LENGTHS = ("num_splits", "num_query_splits", "num_key_splits", "num_queries", "num_keys")
"""Arguments whose values do not specialise a kernel."""


def check_heads(query: Tensor, key: Tensor, value: Tensor, max_width: int) -> None:
    """Raise unless the dtypes and the shapes (B, ..., H, K), (B, S, G, K) and (B, S, G, V) are supported."""
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"query has {query.dtype}: these kernels take float32, bfloat16 and float16")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if (width := max(query.shape[-1], value.shape[-1])) > max_width:
        raise ValueError(f"{width} channels a head: {max_width} are the most")
    fits = key.shape[:-1] == value.shape[:-1] and key.shape[0] == query.shape[0] and key.shape[-1] == query.shape[-1]
    if not fits or query.shape[-2] % key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")


def splits_for(num_programs: int, num_blocks: int, num_multiprocessors: int, num_warps: int, dtype: torch.dtype) -> int:
    """Return the parts of each program's walk of up to `num_blocks` blocks."""
    if num_programs == 0:
        return 1
    wanted = num_multiprocessors * (WARPS_IN_FLOAT32 if dtype == torch.float32 else WARPS) // num_warps
    return max(1, min(wanted // num_programs, num_blocks, MAX_SPLITS))


def of_parts(like: Tensor, num_splits: int) -> Tensor:
    return like.new_empty((num_splits * like.shape[0], *like.shape[1:]), dtype=torch.float32)


def rows_of_parts(num_splits: int, constants: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of a kernel that combines parts; `names` are those of its widths in `constants`."""
    splits, sizes = triton.next_power_of_2(num_splits), {name: constants[name] for name in names}
    return sizes | {"SPLITS": splits, "ROWS": max(1, NUMBERS_AT_ONCE // (splits * max(sizes.values())))}


@triton.jit
def own_part(first, middle, stop, BLOCK: tl.constexpr):
    """Whole blocks, possibly none."""
    num_blocks, split, num_splits = tl.cdiv(stop - first, BLOCK), tl.program_id(1), tl.num_programs(1)
    own_first = first + split * num_blocks // num_splits * BLOCK
    own_stop = tl.minimum(stop, first + (split + 1) * num_blocks // num_splits * BLOCK)
    return own_first, tl.minimum(tl.maximum(middle, own_first), own_stop), own_stop


@triton.jit
def _load_parts(
    parts, num_splits, part_stride, row_stride, position, length,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    split, row = tl.arange(0, SPLITS)[:, None, None], position[None, :, None]
    channel = tl.arange(0, PADDED)[None, None, :]
    parts += split * part_stride + row.to(tl.int64) * row_stride + channel
    return tl.load(parts, mask=(split < num_splits) & (row < length) & (channel < WIDTH), other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def combine_kernel(
    mixed_parts, logsumexp_parts, num_splits, mixed, logsumexp, num_queries,
    HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_queries, ROWS)
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    position = tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS)
    split, row, inside = tl.arange(0, SPLITS)[:, None], sequence * num_queries + position, position < num_queries
    num_rows = (tl.num_programs(0) // num_blocks).to(tl.int64) * num_queries
    own_logsumexp = tl.load(
        logsumexp_parts + split * num_rows + row[None, :],
        mask=(split < num_splits) & inside[None, :],
        other=MASKED_SCORE,
    )
    largest = tl.max(own_logsumexp, 0)
    weight = tl.exp2((own_logsumexp - largest[None, :]) * LOG2_E)
    total = tl.sum(weight, 0)
    first, row_stride = (batch * num_queries * HEADS + head) * VALUE_WIDTH, HEADS * VALUE_WIDTH
    own_mixed = _load_parts(
        mixed_parts + first, num_splits, num_rows * VALUE_WIDTH, row_stride, position, num_queries,
        VALUE_WIDTH, VALUE_PADDED, SPLITS,
    )  # fmt: skip
    combined = tl.sum(weight[:, :, None] * own_mixed, 0) / total[:, None]
    store_rows(mixed + first, row_stride, position, num_queries, combined, VALUE_WIDTH, VALUE_PADDED)
    tl.store(logsumexp + row, largest + tl.log2(total) / LOG2_E, mask=inside)


@triton.jit
def _add_up(parts, num_splits, gradient, gradient_strides, batch, batch_size, head, num_heads, position, length,
            WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    sequence_size = length.to(tl.int64) * num_heads * WIDTH
    parts += batch * sequence_size + head * WIDTH
    own_gradient = _load_parts(
        parts, num_splits, batch_size * sequence_size, num_heads * WIDTH, position, length, WIDTH, PADDED, SPLITS
    )
    gradient += batch * gradient_strides[0] + head * gradient_strides[2]
    store_rows(gradient, gradient_strides[1], position, length, tl.sum(own_gradient, 0), WIDTH, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def add_up_kernel(
    query_parts, num_query_splits, query_gradient, query_gradient_strides,
    key_parts, value_parts, num_key_splits, key_gradient, key_gradient_strides, value_gradient, value_gradient_strides,
    num_queries, num_keys,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the parts' contiguous gradients, for some positions of one head of query, key or value."""
    groups: tl.constexpr = HEADS // SHARED_BY
    head, block = tl.program_id(0) % (HEADS + 2 * groups), tl.program_id(0) // (HEADS + 2 * groups)
    num_blocks = tl.cdiv(tl.maximum(num_queries, num_keys), ROWS)
    position = block % num_blocks * ROWS + tl.arange(0, ROWS)
    batch, batch_size = (block // num_blocks).to(tl.int64), tl.num_programs(0) // ((HEADS + 2 * groups) * num_blocks)
    if head < HEADS:
        _add_up(query_parts, num_query_splits, query_gradient, query_gradient_strides, batch, batch_size, head, HEADS,
                position, num_queries, WIDTH, PADDED, SPLITS)  # fmt: skip
    elif head < HEADS + groups:
        _add_up(key_parts, num_key_splits, key_gradient, key_gradient_strides, batch, batch_size, head - HEADS, groups,
                position, num_keys, WIDTH, PADDED, SPLITS)  # fmt: skip
    else:
        _add_up(value_parts, num_key_splits, value_gradient, value_gradient_strides, batch, batch_size,
                head - HEADS - groups, groups, position, num_keys, VALUE_WIDTH, VALUE_PADDED, SPLITS)  # fmt: skip
