"""Rotary positions (Su et al., 2021) on a packed projection [query | key | value]: split and rotated, joined again, or
rotated in place. One pass over the memory each way; torch's compiler reaches a quarter of the memory bandwidth."""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch

BLOCK = 32
"""Positions per program."""


@triton.jit
def load_rows(
    pointer, row_stride, position, num_positions, WIDTH: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr
):
    """Load rows of WIDTH channels, padded with zeros to PADDED, and if RAGGED zeros from position num_positions on."""
    channel = tl.arange(0, PADDED)[None, :]
    pointer += position.to(tl.int64)[:, None] * row_stride + channel
    if RAGGED:
        inside = position[:, None] < num_positions
        if WIDTH != PADDED:
            inside &= channel < WIDTH
        return tl.load(pointer, mask=inside, other=0.0)
    if WIDTH != PADDED:
        return tl.load(pointer, mask=(position[:, None] >= 0) & (channel < WIDTH), other=0.0)
    return tl.load(pointer)


@triton.jit
def store_rows(pointer, row_stride, position, num_positions, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED)[None, :]
    pointer += position.to(tl.int64)[:, None] * row_stride + channel
    inside = (position[:, None] < num_positions) & (channel < WIDTH)
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def turn(x, rotation, position, num_positions, WIDTH: tl.constexpr, PADDED: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate channel pairs (2i, 2i + 1), or back if INVERSE; float32. `rotation` is (2, positions, WIDTH / 2)."""
    pair = tl.arange(0, PADDED // 2)[None, :]
    inside = (position[:, None] < num_positions) & (pair < WIDTH // 2)
    cos = tl.load(rotation + position[:, None] * (WIDTH // 2) + pair, mask=inside, other=0.0)
    sin = tl.load(rotation + (num_positions + position)[:, None] * (WIDTH // 2) + pair, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    first, second = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], PADDED // 2, 2]))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(turned, [x.shape[0], PADDED])


def padded_width(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def rotated(x_BTHK: Tensor, rotation_2TK: Tensor) -> Tensor:
    copy_BTHK = x_BTHK.new_empty(x_BTHK.shape)
    _copy(x_BTHK, (copy_BTHK, copy_BTHK[:, :, :0], copy_BTHK[:, :, :0]), rotation_2TK)
    return copy_BTHK


def _copy(
    whole_BTHK: Tensor, parts: tuple[Tensor, Tensor, Tensor], rotation_2TK: Tensor, *, joins: bool = False
) -> None:
    """Fill the parts with the heads of the whole, all but the last part rotated; or with `joins`, the whole with the
    heads of the parts, rotated back. Any strides but the last."""
    B, T, num_heads, K = whole_BTHK.shape
    tensors: list[Any] = [argument for x in (whole_BTHK, *parts) for argument in (x, x.stride()[:3])]
    with torch.cuda.device_of(whole_BTHK):
        launch(
            _copy_kernel, (B * -(-T // BLOCK) * num_heads,), *tensors, rotation_2TK, T,
            QUERIES=parts[0].shape[2], KEYS=parts[1].shape[2], HEADS=num_heads, WIDTH=K, PADDED=padded_width(K),
            JOINS=joins, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def _copy_kernel(
    whole, whole_strides, query, query_strides, key, key_strides, value, value_strides, rotation, length,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    JOINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    num_blocks = tl.cdiv(length, BLOCK)
    position = block % num_blocks * BLOCK + tl.arange(0, BLOCK)
    batch = (block // num_blocks).to(tl.int64)
    whole += batch * whole_strides[0] + head * whole_strides[2]
    if head < QUERIES:
        part, row_stride = query + batch * query_strides[0] + head * query_strides[2], query_strides[1]
    elif head < QUERIES + KEYS:
        part, row_stride = key + batch * key_strides[0] + (head - QUERIES) * key_strides[2], key_strides[1]
    else:
        part = value + batch * value_strides[0] + (head - QUERIES - KEYS) * value_strides[2]
        row_stride = value_strides[1]
    if JOINS:
        tile = load_rows(part, row_stride, position, length, WIDTH, PADDED, True)
    else:
        tile = load_rows(whole, whole_strides[1], position, length, WIDTH, PADDED, True)
    if head < QUERIES + KEYS:
        tile = turn(tile, rotation, position, length, WIDTH, PADDED, JOINS).to(tile.dtype)
    if JOINS:
        store_rows(whole, whole_strides[1], position, length, tile, WIDTH, PADDED)
    else:
        store_rows(part, row_stride, position, length, tile, WIDTH, PADDED)


def by_heads(packed_BTC: Tensor, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    by_head = packed_BTC.unflatten(2, (num_heads + 2 * num_groups, -1))
    query, key, value = by_head.split([num_heads, num_groups, num_groups], dim=2)
    return query, key, value


def _parts(packed_BTC: Tensor, rotation_2TK: Any, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = by_heads(packed_BTC, num_heads, num_groups)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@custom_op("split_rotated", _parts, shared={1})
def split_rotated(
    packed_BTC: Tensor, rotation_2TK: Tensor, num_heads: int, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query and key, rotated, and value, each contiguous: (B, T, H, K) and twice (B, T, G, K).

    Args:
        packed_BTC: C = (H + 2 G) K.
        rotation_2TK: cos and sin of ops/layers/rotary.py, float32.
    """
    whole_BTHK = packed_BTC.contiguous().unflatten(2, (num_heads + 2 * num_groups, -1))
    parts = _parts(packed_BTC, rotation_2TK, num_heads, num_groups)
    _copy(whole_BTHK, parts, rotation_2TK)
    return parts


def _whole(query_BTHK: Tensor, key_BTGK: Tensor, *_: Any) -> Tensor:
    (B, T, H, K), G = query_BTHK.shape, key_BTGK.shape[2]
    return query_BTHK.new_empty(B, T, (H + 2 * G) * K)


@custom_op("join_turned_back", _whole, shared={3})
def join_turned_back(query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, rotation_2TK: Tensor) -> Tensor:
    """Return the gradient of `split_rotated`'s packed tensor, given those of its results, which may be views."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_BTHK, key_BTGK, value_BTGK))
    whole_BTC = _whole(query, key)
    _copy(whole_BTC.unflatten(2, (-1, query.shape[3])), (query, key, value), rotation_2TK, joins=True)
    return whole_BTC


@gradient_of(split_rotated, unsaved=(0,))
def _gradient(ctx: Any, *gradients: Tensor | None) -> Tensor:
    (B, T, C), (num_heads, num_groups) = ctx.shapes[0], ctx.settings
    heads, width = (num_heads, num_groups, num_groups), C // (num_heads + 2 * num_groups)
    given = next(x for x in gradients if x is not None)
    pairs = zip(gradients, heads, strict=True)
    parts = (given.new_zeros(B, T, number, width) if x is None else x for x, number in pairs)
    return join_turned_back(*parts, *ctx.saved_tensors)


@custom_op("turn_packed", lambda packed, *_: packed.new_empty(packed.shape), shared={1})
def turn_packed(packed_BTC: Tensor, rotation_2TK: Tensor, num_heads: int, back: bool) -> Tensor:
    """Return a copy whose first `num_heads` heads are rotated, or rotated back; heads have twice as many channels as
    `rotation_2TK`."""
    packed_BTC, width = packed_BTC.contiguous(), 2 * rotation_2TK.shape[2]
    copy_BTC, channels = torch.empty_like(packed_BTC), packed_BTC.shape[2] // width * width
    whole, copy = (x[..., :channels].unflatten(2, (-1, width)) for x in (packed_BTC, copy_BTC))
    whole, copy = (copy, whole) if back else (whole, copy)
    _copy(whole, (copy[:, :, :num_heads], copy[:, :, :0], copy[:, :, num_heads:]), rotation_2TK, joins=back)
    # The rest is less than a head.
    copy_BTC[..., channels:] = packed_BTC[..., channels:]
    return copy_BTC


@gradient_of(turn_packed, unsaved=(0,))
def _gradient_turned(ctx: Any, gradient: Tensor) -> Tensor:
    num_heads, back = ctx.settings
    return turn_packed(gradient, *ctx.saved_tensors, num_heads, not back)
