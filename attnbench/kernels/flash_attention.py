"""FlashAttention in Triton: softmax attention whose weights stay on the chip (Dao et al., 2022; Dao, 2023).

    y_t = sum_s p_ts v_s,   p_ts = exp(c q_t . k_s - z_t),   z_t = log sum_s exp(c q_t . k_s),   c = 1 / sqrt(K)

over the keys s that t sees. The forward pass goes over the keys a block at a time and keeps the largest score so far
and the sum of exponentials under it; z is all it leaves for the backward pass, which makes each block of p once more.
With g_t = dL/dy_t:

    r_t = g_t . y_t,   d_ts = p_ts (g_t . v_s - r_t)
    dL/dv_s = sum_t p_ts g_t,   dL/dq_t = c sum_s d_ts k_s,   dL/dk_s = c sum_t d_ts q_t

A first kernel sums over s and writes r, a second sums over t; neither adds to what another program wrote, so that equal
inputs give equal bits. Scores, statistics and sums are float32; what enters a product has the inputs' dtype.

A program has a block of queries and walks the keys that they see, or the other way round. Where there are too few of
them to fill the device, as with one head, that walk is all the time there is, and it is split: each part i of the keys
gives y_i and z_i of its own, and

    y_t = sum_i exp(z_it - z_t) y_it,   z_t = log sum_i exp(z_it)

Gradients are sums already: those of the parts are added up. Parts are float32, and added in one order.

Two operators. `flash_attention` takes query, key and value as any views whose channels lie side by side.
`packed_flash_attention` takes what one projection made, [query | key | value], rotates it on the way in, and gives back
one gradient of the same form: no pass over the memory is spent on rotating, splitting or joining.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.batching import join_the_batch
from attnbench.kernels.flash_parts import (
    LOG2_E,
    MASKED_SCORE,
    add_up_kernel,
    combine_kernel,
    of_parts,
    own_part,
    rows_of_parts,
    splits_for,
)
from attnbench.kernels.launching import is_roomy, launch, num_multiprocessors, register_fake
from attnbench.kernels.products import float32_product
from attnbench.kernels.rotary import by_heads, load_rows, padded_width, rotated, store_rows, turn

MAX_WIDTH = 128
"""Channels a head. A width that is no power of two is computed as the next one, the rest masked."""

ROTATED_INSIDE_UP_TO = 512
"""Positions. A key is rotated by every block of queries that reads it, which above this length costs more than one pass
over the memory that rotates them all."""


LENGTHS = ("num_queries", "num_keys", "length")
"""Arguments on whose value no kernel is compiled anew: every length runs what the first one compiled."""


class Tiles(NamedTuple):
    """How a kernel is cut up: the speed, not the result beyond rounding."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(kernel: str, dtype: torch.dtype, width: int, length: int, roomy: bool) -> Tiles:
    """By hand, from timings on an H200.

    Args:
        kernel: "forward", "query_gradient" or "key_value_gradient".
        length: the number of keys.
        roomy: `is_roomy`. Elsewhere tiles of wide heads have to do with 99 KiB.
    """
    if dtype == torch.float32:
        # A float32 product is three of tf32, whose operands take registers twice.
        if width > 64:
            return Tiles(32, 32, 8, 2 if roomy or kernel == "forward" else 1)
        return Tiles(32, 32, 4, 2) if kernel == "key_value_gradient" else Tiles(64, 32, 4, 2)
    if width > 64:
        if kernel == "forward":
            if not roomy:
                return Tiles(128, 64, 8, 2)
            return Tiles(128, 128, 8, 3) if length > 1024 else Tiles(128, 64, 8, 3)
        # A group of four warps multiplies 64 rows at once. Two groups on 64 rows have products half as wide each, which
        # takes half as long again.
        large = roomy and kernel == "query_gradient" and length > 512
        return Tiles(128, 64, 8, 3) if large else Tiles(64, 64, 4, 2)
    if kernel == "forward":
        return Tiles(128, 64, 4, 3) if length > 512 else Tiles(64, 64, 4, 2)
    if kernel == "query_gradient":
        return Tiles(64, 64, 4, 2) if length > 512 else Tiles(64, 64, 4, 1)
    return Tiles(64, 64, 4, 3) if length > 1024 else Tiles(64, 64, 4, 1)


@triton.jit
def _visible(query_position, key_position, num_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a query sees; its position counts as the keys' do, the last query standing beside the last key."""
    seen = key_position < num_keys
    if CAUSAL:
        seen &= key_position <= query_position
    if WINDOW > 0:
        seen &= query_position - key_position < WINDOW
    return seen


@triton.jit
def _keys_in_view(
    first_query, offset, num_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """For a block of queries: the first key that any of them sees, the end of those that all see, the end of all."""
    first, stop, all_seen = 0, num_keys, num_keys
    if CAUSAL:
        stop = tl.minimum(num_keys, first_query + QUERIES + offset)
        all_seen = tl.minimum(num_keys, first_query + offset + 1)
    if WINDOW > 0:
        first = tl.maximum(0, first_query + offset - WINDOW + 1) // KEYS * KEYS
        all_seen = first
    return first, all_seen // KEYS * KEYS, stop


# In the kernels below a tensor of (B, T, H, K) comes with its strides along B, T and H as a tuple. With SPLIT, programs
# along the grid's second axis have parts of one walk, and what they write has B for every part, one after the other.


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, mixed, logsumexp,
    num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, HEADS: tl.constexpr, SHARED_BY: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; `mixed` is contiguous."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    # The last block sees most: it starts first, so that short ones fill up the end.
    first_query = (num_blocks - 1 - tl.program_id(0) % num_blocks) * QUERIES
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    query += batch * query_strides[0] + head * query_strides[2]
    key += batch * key_strides[0] + head // SHARED_BY * key_strides[2]
    value += batch * value_strides[0] + head // SHARED_BY * value_strides[2]
    position = first_query + tl.arange(0, QUERIES)
    query_tile = load_rows(query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
    if ROTATE_QUERY:
        query_tile = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False).to(query_tile.dtype)
    offset = num_keys - num_queries
    first, middle, stop = _keys_in_view(first_query, offset, num_keys, CAUSAL, WINDOW, QUERIES, KEYS)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, KEYS)
    accumulated = tl.zeros([QUERIES, PADDED], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], MASKED_SCORE, tl.float32)
    for masked in tl.static_range(2):
        for first_key in range(middle if masked else first, stop if masked else middle, KEYS):
            key_position = first_key + tl.arange(0, KEYS)
            key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            if ROTATE_KEY:
                key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
            if masked:
                # Scaled before it is masked: a GPU multiplies and subtracts with one rounding, and what is left of
                # 1e30 minus the same rounded once more is no small number.
                seen = _visible(position[:, None] + offset, key_position[None, :], num_keys, CAUSAL, WINDOW)
                score = tl.where(seen, score * (scale * LOG2_E), MASKED_SCORE)
                new_largest = tl.maximum(largest, tl.max(score, 1))
                weight = tl.exp2(score - new_largest[:, None])
            else:
                new_largest = tl.maximum(largest, tl.max(score, 1) * (scale * LOG2_E))
                weight = tl.exp2(score * (scale * LOG2_E) - new_largest[:, None])
            correction = tl.exp2(largest - new_largest)
            total = total * correction + tl.sum(weight, 1)
            value_tile = load_rows(value, value_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            accumulated = tl.dot(
                weight.to(value_tile.dtype), value_tile, accumulated * correction[:, None], input_precision=PRECISION
            )
            largest = new_largest
    if SPLIT:
        # In an empty part a row has seen no key, not even a masked one: it must not divide by 0 to weigh nothing.
        total = tl.where(total > 0, total, 1.0)
        sequence += tl.program_id(1) * (tl.num_programs(0) // num_blocks)
        batch = sequence // HEADS
    mixed += (batch * num_queries * HEADS + head) * WIDTH
    store_rows(mixed, HEADS * WIDTH, position, num_queries, accumulated / total[:, None], WIDTH, PADDED)
    logsumexp += sequence * num_queries + position
    tl.store(logsumexp, (largest + tl.log2(total)) / LOG2_E, mask=position < num_queries)


@triton.jit(do_not_specialize=LENGTHS)
def _query_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, mixed, logsumexp,
    gradient, gradient_strides, own_product, query_gradient, query_gradient_strides, num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, HEADS: tl.constexpr, SHARED_BY: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; also writes its r_t, which the other kernel reads."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    first_query = (num_blocks - 1 - tl.program_id(0) % num_blocks) * QUERIES
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    query += batch * query_strides[0] + head * query_strides[2]
    key += batch * key_strides[0] + head // SHARED_BY * key_strides[2]
    value += batch * value_strides[0] + head // SHARED_BY * value_strides[2]
    gradient += batch * gradient_strides[0] + head * gradient_strides[2]
    mixed += (batch * num_queries * HEADS + head) * WIDTH
    position = first_query + tl.arange(0, QUERIES)
    query_tile = load_rows(query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
    if ROTATE_QUERY:
        query_tile = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False).to(query_tile.dtype)
    gradient_tile = load_rows(gradient, gradient_strides[1], position, num_queries, WIDTH, PADDED, True)
    mixed_tile = load_rows(mixed, HEADS * WIDTH, position, num_queries, WIDTH, PADDED, True)
    row, inside = sequence * num_queries + position, position < num_queries
    row_product = tl.sum(gradient_tile.to(tl.float32) * mixed_tile.to(tl.float32), 1)
    # Of a walk that is split, every part writes the same.
    tl.store(own_product + row, row_product, mask=inside)
    logsumexp_log2 = tl.load(logsumexp + row, mask=inside, other=0.0) * LOG2_E
    offset = num_keys - num_queries
    first, middle, stop = _keys_in_view(first_query, offset, num_keys, CAUSAL, WINDOW, QUERIES, KEYS)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, KEYS)
    accumulated = tl.zeros([QUERIES, PADDED], tl.float32)
    for masked in tl.static_range(2):
        for first_key in range(middle if masked else first, stop if masked else middle, KEYS):
            key_position = first_key + tl.arange(0, KEYS)
            key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            value_tile = load_rows(value, value_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            if ROTATE_KEY:
                key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
            weight = tl.exp2(score * (scale * LOG2_E) - logsumexp_log2[:, None])
            if masked:
                seen = _visible(position[:, None] + offset, key_position[None, :], num_keys, CAUSAL, WINDOW)
                weight = tl.where(seen, weight, 0.0)
            weight_gradient = tl.dot(gradient_tile, tl.trans(value_tile), input_precision=PRECISION)
            score_gradient = (weight * (weight_gradient - row_product[:, None])).to(key_tile.dtype)
            accumulated = tl.dot(score_gradient, key_tile, accumulated, input_precision=PRECISION)
    accumulated *= scale
    if ROTATE_QUERY:
        accumulated = turn(accumulated, rotation, position, num_queries, WIDTH, PADDED, True)
    if SPLIT:
        batch += tl.program_id(1) * (tl.num_programs(0) // (num_blocks * HEADS))
    query_gradient += batch * query_gradient_strides[0] + head * query_gradient_strides[2]
    store_rows(query_gradient, query_gradient_strides[1], position, num_queries, accumulated, WIDTH, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def _key_value_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, logsumexp,
    gradient, gradient_strides, own_product, key_gradient, key_gradient_strides, value_gradient, value_gradient_strides,
    num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, HEADS: tl.constexpr, SHARED_BY: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head, over all query heads that share it. The first block is seen by most.

    Keys go down the tiles here and queries across. Queries past the last are zeros, their gradients too: they add
    nothing. Keys past the last get sums that are not stored.
    """
    num_blocks = tl.cdiv(num_keys, KEYS)
    first_key = tl.program_id(0) % num_blocks * KEYS
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, group = sequence // (HEADS // SHARED_BY), sequence % (HEADS // SHARED_BY)
    key += batch * key_strides[0] + group * key_strides[2]
    value += batch * value_strides[0] + group * value_strides[2]
    key_position = first_key + tl.arange(0, KEYS)
    key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, True)
    value_tile = load_rows(value, value_strides[1], key_position, num_keys, WIDTH, PADDED, True)
    if ROTATE_KEY:
        key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
    offset = num_keys - num_queries
    # Queries from `first` on see some of these keys, from `middle` on all of them (with a window, none surely does).
    first, middle, stop = 0, 0, num_queries
    if CAUSAL:
        first = tl.maximum(0, first_key - offset) // QUERIES * QUERIES
        middle = tl.cdiv(tl.maximum(0, first_key + KEYS - 1 - offset), QUERIES) * QUERIES
        if WINDOW > 0:
            stop = tl.minimum(num_queries, first_key + KEYS - 1 - offset + WINDOW)
            middle = stop
        middle = tl.minimum(middle, stop)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, QUERIES)
    key_accumulated = tl.zeros([KEYS, PADDED], tl.float32)
    value_accumulated = tl.zeros([KEYS, PADDED], tl.float32)
    for member in range(SHARED_BY):
        head = group * SHARED_BY + member
        head_query = query + batch * query_strides[0] + head * query_strides[2]
        head_gradient = gradient + batch * gradient_strides[0] + head * gradient_strides[2]
        head_row = (batch * HEADS + head) * num_queries
        for masked in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            for first_query in range(first if masked else middle, middle if masked else stop, QUERIES):
                position = first_query + tl.arange(0, QUERIES)
                row, inside = head_row + position, position < num_queries
                query_tile = load_rows(head_query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
                gradient_tile = load_rows(
                    head_gradient, gradient_strides[1], position, num_queries, WIDTH, PADDED, True
                )
                logsumexp_log2 = tl.load(logsumexp + row, mask=inside, other=0.0) * LOG2_E
                row_product = tl.load(own_product + row, mask=inside, other=0.0)
                if ROTATE_QUERY:
                    turned = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False)
                    query_tile = turned.to(query_tile.dtype)
                score = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
                weight = tl.exp2(score * (scale * LOG2_E) - logsumexp_log2[None, :])
                if masked:
                    seen = _visible(position[None, :] + offset, key_position[:, None], num_keys, CAUSAL, WINDOW)
                    weight = tl.where(seen, weight, 0.0)
                value_accumulated = tl.dot(
                    weight.to(gradient_tile.dtype), gradient_tile, value_accumulated, input_precision=PRECISION
                )
                weight_gradient = tl.dot(value_tile, tl.trans(gradient_tile), input_precision=PRECISION)
                score_gradient = (weight * (weight_gradient - row_product[None, :])).to(query_tile.dtype)
                key_accumulated = tl.dot(score_gradient, query_tile, key_accumulated, input_precision=PRECISION)
    key_accumulated *= scale
    if ROTATE_KEY:
        key_accumulated = turn(key_accumulated, rotation, key_position, num_keys, WIDTH, PADDED, True)
    if SPLIT:
        batch += tl.program_id(1) * (tl.num_programs(0) // (num_blocks * (HEADS // SHARED_BY)))
    key_gradient += batch * key_gradient_strides[0] + group * key_gradient_strides[2]
    store_rows(key_gradient, key_gradient_strides[1], key_position, num_keys, key_accumulated, WIDTH, PADDED)
    value_gradient += batch * value_gradient_strides[0] + group * value_gradient_strides[2]
    store_rows(value_gradient, value_gradient_strides[1], key_position, num_keys, value_accumulated, WIDTH, PADDED)


def _launch(kernel: Any, grid: tuple[int, int], query: Tensor, *arguments: Any, **constants: Any) -> None:
    """Runs a kernel on the device of its first tensor."""
    with torch.cuda.device_of(query):
        launch(kernel, grid, query, *arguments, **constants)


def _with_strides(*tensors: Tensor) -> list[Any]:
    """Each followed by its strides along B, T and H."""
    return [part for x in tensors for part in (x, x.stride()[:3])]


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _grid(
    num_programs: int, walked: int, window: int | None, walks: str, constants: dict[str, Any], query: Tensor
) -> tuple[int, int]:
    """Of a kernel: the programs that there are without splitting, and parts of the positions that each walks, which are
    "KEYS" or "QUERIES"."""
    num_blocks, num_warps = _blocks(min(walked, window or walked), constants[walks]), constants["num_warps"]
    return num_programs, splits_for(num_programs, num_blocks, num_multiprocessors(query.device), num_warps, query.dtype)


def _constants(kernel: str, query: Tensor, key: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """What a kernel of this problem is compiled for, rotation apart."""
    tiles = tiles_for(kernel, query.dtype, query.shape[3], key.shape[1], is_roomy(query.device))
    return {
        "HEADS": query.shape[2],
        "SHARED_BY": query.shape[2] // key.shape[2],
        "WIDTH": query.shape[3],
        "PADDED": padded_width(query.shape[3]),
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "PRECISION": float32_product(),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _forward(
    query: Tensor, key: Tensor, value: Tensor, rotation: Tensor | None, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """y, contiguous, and z; arguments as in `flash_attention`, `rotation` as in `packed_flash_attention`."""
    (B, T, H, K), S = query.shape, key.shape[1]
    mixed, logsumexp = query.new_empty(query.shape), query.new_empty((B, H, T), dtype=torch.float32)
    ahead = _rotated_ahead(rotation, key)
    constants = _constants("forward", query, key, causal, window)
    grid = _grid(B * H * _blocks(T, constants["QUERIES"]), S, window, "KEYS", constants, query)
    splits = grid[1]
    parts = (mixed, logsumexp) if splits == 1 else (of_parts(mixed, splits), of_parts(logsumexp, splits))
    _launch(
        _forward_kernel,
        grid,
        *_with_strides(query, key if ahead is None else rotated(key, ahead), value),
        *(rotation, *parts, T, S, K**-0.5),
        ROTATE_QUERY=rotation is not None,
        ROTATE_KEY=rotation is not None and ahead is None,
        SPLIT=splits > 1,
        **constants,
    )
    if splits > 1:
        tile = rows_of_parts(splits, constants)
        grid = (B * H * _blocks(T, tile["ROWS"]), 1)
        _launch(combine_kernel, grid, *parts, splits, mixed, logsumexp, T, HEADS=H, **tile)
    return mixed, logsumexp


def _rotated_ahead(rotation: Tensor | None, key: Tensor) -> Tensor | None:
    """The rotation, where what a kernel reads again and again is to be rotated before it.

    Always where a product is a single one of TF32: Triton (3.6, 3.7.1) does not compile `_query_gradient_kernel` for
    Hopper's and Blackwell's instructions then, which multiply a key rotated inside as it is and transposed. And where
    tiles that are rotated inside do not fit into the device's shared memory.
    """
    is_float32 = key.dtype == torch.float32
    is_single = is_float32 and float32_product() == "tf32"
    is_tight = (is_float32 or key.shape[3] > 64) and not is_roomy(key.device)
    return rotation if is_single or is_tight or key.shape[1] > ROTATED_INSIDE_UP_TO else None


def _backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    rotation: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int | None,
) -> None:
    """Fills `gradients`, those of the inputs query, key and value before their rotation, given the gradient in y."""
    (query_gradient, key_gradient, value_gradient), (query, key, value) = gradients, inputs
    gradient, own_product = _channels_side_by_side(gradient), torch.empty_like(logsumexp)
    (B, T, H, K), (S, G) = query.shape, key.shape[1:3]
    ahead = _rotated_ahead(rotation, key)
    rotate, rotate_repeated = rotation is not None, rotation is not None and ahead is None
    of_queries = _constants("query_gradient", query, key, causal, window)
    of_keys = _constants("key_value_gradient", query, key, causal, window)
    query_grid = _grid(B * H * _blocks(T, of_queries["QUERIES"]), S, window, "KEYS", of_queries, query)
    key_grid = _grid(B * G * _blocks(S, of_keys["KEYS"]), T, window, "QUERIES", of_keys, query)
    query_splits, key_splits = query_grid[1], key_grid[1]
    # If one is split both are, the other perhaps into a single part: one kernel adds up all three gradients.
    split = max(query_splits, key_splits) > 1
    if split:
        query_parts = of_parts(query_gradient, query_splits)
        key_parts, value_parts = of_parts(key_gradient, key_splits), of_parts(value_gradient, key_splits)
    else:
        query_parts, key_parts, value_parts = gradients
    _launch(
        _query_gradient_kernel,
        query_grid,
        *_with_strides(query, key if ahead is None else rotated(key, ahead), value),
        *(rotation, mixed, logsumexp, *_with_strides(gradient), own_product, *_with_strides(query_parts)),
        *(T, S, K**-0.5),
        ROTATE_QUERY=rotate,
        ROTATE_KEY=rotate_repeated,
        SPLIT=split,
        **of_queries,
    )
    _launch(
        _key_value_gradient_kernel,
        key_grid,
        *_with_strides(query if ahead is None else rotated(query, ahead), key, value),
        *(rotation, logsumexp, *_with_strides(gradient), own_product, *_with_strides(key_parts, value_parts)),
        *(T, S, K**-0.5),
        ROTATE_QUERY=rotate_repeated,
        ROTATE_KEY=rotate,
        SPLIT=split,
        **of_keys,
    )
    if split:
        tile = rows_of_parts(max(query_splits, key_splits), of_keys)
        _launch(
            add_up_kernel,
            (B * (H + 2 * G) * _blocks(max(T, S), tile["ROWS"]), 1),
            *(query_parts, query_splits, *_with_strides(query_gradient)),
            *(key_parts, value_parts, key_splits, *_with_strides(key_gradient, value_gradient), T, S),
            HEADS=H,
            SHARED_BY=H // G,
            **tile,
        )


def _channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> None:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"query has {query.dtype}: float32, bfloat16 and float16 are what this kernel has")
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        raise TypeError("Triton's interpreter computes no products in bfloat16; float32 and float16 work there")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if query.shape[3] > MAX_WIDTH:
        raise ValueError(f"{query.shape[3]} channels a head: {MAX_WIDTH} are the most")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or query.shape[2] % key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if causal and query.shape[1] > key.shape[1]:
        raise ValueError(f"{query.shape[1]} queries, {key.shape[1]} keys: the first queries would see no key")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window of {window}, causal={causal}: must be at least 1, and needs causal attention")


@torch.library.custom_op("attnbench::flash_attention", mutates_args=())
def _flash_attention(
    query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """`flash_attention`, and z as (B, H, T)."""
    _check(query_BTHK, key_BSGK, value_BSGK, causal, window)
    query, key, value = (_channels_side_by_side(x) for x in (query_BTHK, key_BSGK, value_BSGK))
    return _forward(query, key, value, None, causal, window)


@register_fake(_flash_attention)
def _(
    query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = query_BTHK.shape
    return query_BTHK.new_empty(query_BTHK.shape), query_BTHK.new_empty((B, H, T), dtype=torch.float32)


@torch.library.custom_op("attnbench::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    gradient_BTHK: Tensor,
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    mixed_BTHK: Tensor,
    logsumexp_BHT: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each contiguous."""
    query, key, value = (_channels_side_by_side(x) for x in (query_BTHK, key_BSGK, value_BSGK))
    gradients = (query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape))
    _backward(gradients, gradient_BTHK, (query, key, value), None, mixed_BTHK, logsumexp_BHT, causal, window)
    return gradients


@register_fake(_flash_attention_backward)
def _(
    gradient_BTHK: Tensor, query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = query_BTHK, key_BSGK, value_BSGK
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    # Else zeros would be filled in for the gradient of z, that nothing reads.
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 5
    return (*_flash_attention_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.window), None, None)


_flash_attention.register_autograd(_gradient, setup_context=_save)


join_the_batch(_flash_attention)


def flash_attention(
    query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, *, causal: bool, window: int | None = None
) -> Tensor:
    """Attention of H query heads over G key/value heads, each shared by H / G; (B, T, H, K).

    Args:
        causal: a query sees the keys up to its own position, the last query standing at the last key.
        window: of those, the last so many, its own position included; None for all.
    """
    return _flash_attention(query_BTHK, key_BSGK, value_BSGK, causal, window)[0]


@torch.library.custom_op("attnbench::packed_flash_attention", mutates_args=())
def _packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`packed_flash_attention`, and z as (B, H, T)."""
    query, key, value = by_heads(_channels_side_by_side(packed_BTC), num_heads, num_key_value_heads)
    _check(query, key, value, causal, window)
    if rotation_2TK is not None:
        _check_rotation(query, rotation_2TK)
    mixed, logsumexp = _forward(query, key, value, rotation_2TK, causal, window)
    return mixed.flatten(2), logsumexp


def _check_rotation(query: Tensor, rotation: Tensor) -> None:
    expected = (2, query.shape[1], query.shape[3] // 2)
    if query.shape[3] % 2 or rotation.shape != expected or rotation.dtype != torch.float32:
        raise ValueError(f"rotation is {rotation.dtype} {tuple(rotation.shape)}, must be float32 {expected}")
    if not rotation.is_contiguous():
        raise ValueError("rotation must be contiguous")


@register_fake(_packed_flash_attention)
def _(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    B, T, C = packed_BTC.shape
    width = C // (num_heads + 2 * num_key_value_heads)
    return packed_BTC.new_empty((B, T, num_heads * width)), packed_BTC.new_empty((B, num_heads, T), dtype=torch.float32)


@torch.library.custom_op("attnbench::packed_flash_attention_backward", mutates_args=())
def _packed_flash_attention_backward(
    gradient_BTC: Tensor,
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    mixed_BTC: Tensor,
    logsumexp_BHT: Tensor,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """The gradient of packed_BTC, contiguous."""
    packed_gradient = packed_BTC.new_empty(packed_BTC.shape)
    _backward(
        by_heads(packed_gradient, num_heads, num_key_value_heads),
        gradient_BTC.unflatten(-1, (num_heads, -1)),
        by_heads(_channels_side_by_side(packed_BTC), num_heads, num_key_value_heads),
        rotation_2TK,
        mixed_BTC,
        logsumexp_BHT,
        causal,
        window,
    )
    return packed_gradient


@register_fake(_packed_flash_attention_backward)
def _(gradient_BTC: Tensor, packed_BTC: Tensor, *_: Any) -> Tensor:
    return packed_BTC.new_empty(packed_BTC.shape)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, rotation, *ctx.settings = inputs
    ctx.save_for_backward(packed, rotation, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _packed_gradient(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    return (_packed_flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings), *(None,) * 5)


_packed_flash_attention.register_autograd(_packed_gradient, setup_context=_save_packed)


join_the_batch(_packed_flash_attention, shared={1})


def packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    *,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """The same of one tensor that holds query, key and value side by side; heads side by side too, (B, T, H K).

    Args:
        packed_BTC: [query | key | value] with H, G and G heads of K channels each.
        rotation_2TK: cos and sin, (2, T, K / 2) in float32, by which channel pairs (2i, 2i + 1) of query and key are
            turned before they meet; None for no rotation. It has no gradient.
        causal, window: as in `flash_attention`.
    """
    return _packed_flash_attention(packed_BTC, rotation_2TK, num_heads, num_key_value_heads, causal, window)[0]
