"""Rotary positions on what one projection made, [query | key | value]: split, rotated, and put together again.

    channels (2i, 2i + 1) of position t, turned by the angle t × theta^(-2i/K)                   (Su et al., 2021)

One pass over the memory each way. The backward pass turns the gradients back while it joins them, which torch's
compiler, left to itself, does at a quarter of the memory's speed.
"""

# Launching a kernel gives plain numbers for its constexpr arguments.
# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.batching import join_the_batch

BLOCK = 32
"""Positions of a program."""


@triton.jit
def load_rows(
    pointer, row_stride, position, num_positions, WIDTH: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr
):
    """Rows of WIDTH channels, padded with zeros to PADDED; RAGGED: positions from num_positions on are zeros too."""
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
    """Turns channel pairs (2i, 2i + 1) by their angles, or back; float32. `rotation` is (2, positions, WIDTH / 2)."""
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
    """The power of two, at least 16, that a head's channels are computed as."""
    return max(16, 1 << (width - 1).bit_length())


def rotated(x_BTHK: Tensor, rotation_2TK: Tensor) -> Tensor:
    """A rotated copy, contiguous."""
    copy_BTHK = x_BTHK.new_empty(x_BTHK.shape)
    _copy(x_BTHK, copy_BTHK, rotation_2TK)
    return copy_BTHK


def _copy(source_BTHK: Tensor, target_BTHK: Tensor, rotation_2TK: Tensor | None, *, inverse: bool = False) -> None:
    """Fills the target, rotated or turned back, or as it is where there is no rotation; any strides but the last."""
    B, T, H, K = source_BTHK.shape
    with torch.cuda.device_of(source_BTHK):
        _copy_kernel[(B * -(-T // BLOCK), H)](
            *(source_BTHK, source_BTHK.stride()[:3], target_BTHK, target_BTHK.stride()[:3], rotation_2TK, T),
            WIDTH=K,
            PADDED=padded_width(K),
            ROTATES=rotation_2TK is not None,
            INVERSE=inverse,
            BLOCK=BLOCK,
        )


@triton.jit(do_not_specialize=["length"])
def _copy_kernel(
    source, source_strides, target, target_strides, rotation, length,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTATES: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of positions of one head."""
    num_blocks = tl.cdiv(length, BLOCK)
    position = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    batch, head = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(1)
    own = source + batch * source_strides[0] + head * source_strides[2]
    tile = load_rows(own, source_strides[1], position, length, WIDTH, PADDED, True)
    if ROTATES:
        tile = turn(tile, rotation, position, length, WIDTH, PADDED, INVERSE)
    own = target + batch * target_strides[0] + head * target_strides[2]
    store_rows(own, target_strides[1], position, length, tile, WIDTH, PADDED)


def by_heads(packed_BTC: Tensor, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of query, key and value, or of their gradients, by heads."""
    by_head = packed_BTC.unflatten(2, (num_heads + 2 * num_groups, -1))
    query, key, value = by_head.split([num_heads, num_groups, num_groups], dim=2)
    return query, key, value


@torch.library.custom_op("attnbench::split_rotated", mutates_args=())
def split_rotated(
    packed_BTC: Tensor, rotation_2TK: Tensor, num_heads: int, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key, rotated, and value, each contiguous: (B, T, H, K) and twice (B, T, G, K).

    Args:
        packed_BTC: C = (H + 2 G) K.
        rotation_2TK: cosines and sines, float32, as layers.rotation gives them.
    """
    query, key, value = by_heads(packed_BTC.contiguous(), num_heads, num_groups)
    value_copy = value.new_empty(value.shape)
    _copy(value, value_copy, None)
    return rotated(query, rotation_2TK), rotated(key, rotation_2TK), value_copy


@split_rotated.register_fake
def _(packed_BTC: Tensor, rotation_2TK: Tensor, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = by_heads(packed_BTC, num_heads, num_groups)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op("attnbench::join_turned_back", mutates_args=())
def join_turned_back(query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, rotation_2TK: Tensor) -> Tensor:
    """The gradient of `split_rotated`'s packed tensor, given those of its results, which may be views."""
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in (query_BTHK, key_BTGK, value_BTGK)]
    (B, T, H, K), G = query_BTHK.shape, key_BTGK.shape[2]
    packed_BTC = query_BTHK.new_empty(B, T, (H + 2 * G) * K)
    for x, part, rotation in zip(given, by_heads(packed_BTC, H, G), (rotation_2TK, rotation_2TK, None), strict=True):
        _copy(x, part, rotation, inverse=True)
    return packed_BTC


@join_turned_back.register_fake
def _(query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, rotation_2TK: Tensor) -> Tensor:
    (B, T, H, K), G = query_BTHK.shape, key_BTGK.shape[2]
    return query_BTHK.new_empty(B, T, (H + 2 * G) * K)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value = gradients
    return join_turned_back(query, key, value, *ctx.saved_tensors), None, None, None


split_rotated.register_autograd(_gradient, setup_context=_save)


join_the_batch(split_rotated, shared={1})
join_the_batch(join_turned_back, shared={3})
