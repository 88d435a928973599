"""Linear attention with normaliser, from packed inputs to the quotient, in one pass over the memory.

A program walks a segment of one head of one sequence, chunk by chunk, with the state in registers. With enough heads to
fill a GPU a segment is the whole sequence. Otherwise the segments' states are summed first and then cumulated.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch
from attnbench.ops.common.triton.products import product_precision
from attnbench.ops.linear.triton.linear_gradient import (
    linear_key_value_gradient_kernel,
    linear_query_gradient_kernel,
    linear_sums_backward_kernel,
)
from attnbench.ops.linear.triton.linear_kernels import linear_forward_kernel, linear_sums_kernel

WIDTHS = range(16, 129)
"""Supported channels per head."""

DTYPES = (torch.float32, torch.bfloat16)


class Blocks(NamedTuple):
    """Launch sizes; change results by rounding only."""

    positions: int
    """Per chunk."""
    num_warps: int
    num_stages: int


def linear_attention(
    mixed_BTC: Tensor,
    memory_BHKV: Tensor | None,
    normaliser_BHK: Tensor | None,
    num_heads: int,
    feature_map: str,
    eps: float,
    rotation_2TK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y_t = S_t^T f(q_t) / (f(q_t) . z_t + eps) as (B, T, H, V), and the last S and z. With rotary positions S
    is written and read by rotated features. Products run in the dtype of q, k and v; S and z are float32 and have no
    gradient.

    Args:
        mixed_BTC: packed query, key and value, (num_heads, K) each: float32 or bfloat16, K as in `WIDTHS`.
        memory_BHKV, normaliser_BHK: S and z before the first position; None for zeros.
        feature_map: f: elu (elu(x) + 1), relu, or identity if applied before.
        rotation_2TK: see ops/layers/rotary.py; None for no rotary positions.
    """
    y_BTHV, _, memory_BHNKV, normaliser_BHNK = mix(
        mixed_BTC, memory_BHKV, normaliser_BHK, rotation_2TK, num_heads, feature_map, eps
    )
    return y_BTHV, memory_BHNKV[:, :, -1], normaliser_BHNK[:, :, -1]


def segment_positions(batch: int, length: int, num_heads: int) -> int:
    """Return the positions per program: the whole sequence, or with too few heads to fill a GPU a part, for about 512
    programs, but at least 256, because every segment writes and reads a state."""
    wanted = max(1, 512 // (batch * num_heads))
    return length if batch * num_heads >= 256 else max(256, 64 * math.ceil(length / wanted / 64))


def _outputs(mixed_BTC: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, channels = mixed_BTC.shape
    width = channels // (3 * num_heads)
    states = (batch, num_heads, math.ceil(length / segment_positions(batch, length, num_heads)), width)
    return (
        mixed_BTC.new_empty((batch, length, num_heads, width)),
        mixed_BTC.new_empty((batch, num_heads, length), dtype=torch.float32),
        mixed_BTC.new_empty((*states, width), dtype=torch.float32),
        mixed_BTC.new_empty(states, dtype=torch.float32),
    )


@custom_op(
    "linear_attention",
    lambda mixed, memory, normaliser, rotation, num_heads, *_: _outputs(mixed, num_heads),
    shared=(3,),
)
def mix(
    mixed_BTC: Tensor,
    memory_BHKV: Tensor | None,
    normaliser_BHK: Tensor | None,
    rotation_2TK: Tensor | None,
    num_heads: int,
    feature_map: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the divisor as (B, H, T), and S and z after each of N segments."""
    mixed_BTC = mixed_BTC.contiguous()
    blocks = forward_blocks(mixed_BTC, num_heads, rotation_2TK is not None)
    arguments = _arguments(mixed_BTC, rotation_2TK, num_heads, feature_map, blocks)
    y_BTHV, divisor_BHT, memory_BHNKV, normaliser_BHNK = _outputs(mixed_BTC, num_heads)
    num_segments = memory_BHNKV.shape[2]
    grid = (mixed_BTC.shape[0] * num_heads * num_segments,)
    if num_segments > 1:
        launch(linear_sums_kernel, grid, memory=memory_BHNKV, normaliser=normaliser_BHNK, **arguments)
        memory_BHNKV, normaliser_BHNK = memory_BHNKV.cumsum(2), normaliser_BHNK.cumsum(2)
        if memory_BHKV is not None and normaliser_BHK is not None:
            memory_BHNKV += memory_BHKV[:, :, None]
            normaliser_BHNK += normaliser_BHK[:, :, None]
    arguments |= _states(memory_BHKV, normaliser_BHK, memory_BHNKV, normaliser_BHNK)
    launch(linear_forward_kernel, grid, y=y_BTHV, divisor=divisor_BHT, eps=eps, **arguments)
    return y_BTHV, divisor_BHT, memory_BHNKV, normaliser_BHNK


@custom_op("linear_attention_backward", lambda gradient, mixed, *_: mixed.new_empty(mixed.shape), shared=(4,))
def mix_backward(
    gradient_BTHV: Tensor,
    mixed_BTC: Tensor,
    memory_BHKV: Tensor | None,
    normaliser_BHK: Tensor | None,
    rotation_2TK: Tensor | None,
    y_BTHV: Tensor,
    divisor_BHT: Tensor,
    memory_BHNKV: Tensor,
    normaliser_BHNK: Tensor,
    num_heads: int,
    feature_map: str,
) -> Tensor:
    mixed_BTC, gradient_BTHV = mixed_BTC.contiguous(), gradient_BTHV.contiguous()
    blocks = backward_blocks(mixed_BTC, num_heads, rotation_2TK is not None)
    arguments = _arguments(mixed_BTC, rotation_2TK, num_heads, feature_map, blocks)
    arguments |= {"of_y": gradient_BTHV, "y": y_BTHV, "divisor": divisor_BHT}
    of_mixed = torch.empty_like(mixed_BTC)
    of_memory, of_normaliser = memory_BHNKV, normaliser_BHNK
    num_segments = memory_BHNKV.shape[2]
    grid = (mixed_BTC.shape[0] * num_heads * num_segments,)
    if num_segments > 1:
        of_memory, of_normaliser = torch.empty_like(memory_BHNKV), torch.empty_like(normaliser_BHNK)
        launch(linear_sums_backward_kernel, grid, of_memory=of_memory, of_normaliser=of_normaliser, **arguments)
        of_memory, of_normaliser = (x.flip(2).cumsum(2).flip(2) for x in (of_memory, of_normaliser))
    arguments |= {"of_mixed": of_mixed}
    states = _states(memory_BHKV, normaliser_BHK, memory_BHNKV, normaliser_BHNK)
    launch(linear_query_gradient_kernel, grid, **states, **arguments)
    launch(linear_key_value_gradient_kernel, grid, of_memory=of_memory, of_normaliser=of_normaliser, **arguments)
    return of_mixed


@gradient_of(mix, keeps=slice(None))
def _gradient(ctx: Any, of_y: Tensor | None, *of_states: Tensor | None) -> Tensor:
    if any(ctx.needs_input_grad[1:4]) or any(gradient is not None for gradient in of_states):
        raise NotImplementedError("linear_attention has no gradient through its states or its rotation")
    num_heads, feature_map, _ = ctx.settings
    return mix_backward(of_y, *ctx.saved_tensors, num_heads, feature_map)


def forward_blocks(mixed_BTC: Tensor, num_heads: int, is_rotated: bool) -> Blocks:
    """Choose by hand: 128-channel states (64 in float32) need the registers of eight warps, and twice the shared
    memory."""
    width, is_half = mixed_BTC.shape[2] // (3 * num_heads), mixed_BTC.dtype == torch.bfloat16
    is_wide = width > (64 if is_half else 32)
    # Rotation doubles the features: in float32 a thread of 32 positions of 64 channels spilled up to 1,856 bytes, of 16
    # it spills 244.
    positions = 64 if is_half else 16 if is_rotated and is_wide else 32
    positions = 16 if mixed_BTC.shape[1] <= 16 else positions
    return Blocks(positions, num_warps=8 if is_wide else 4, num_stages=2 if width <= 64 else 1)


def backward_blocks(mixed_BTC: Tensor, num_heads: int, is_rotated: bool) -> Blocks:
    return forward_blocks(mixed_BTC, num_heads, is_rotated)._replace(num_stages=1)


def _arguments(
    mixed_BTC: Tensor, rotation_2TK: Tensor | None, num_heads: int, feature_map: str, blocks: Blocks
) -> dict[str, Any]:
    batch, length, channels = mixed_BTC.shape
    width, rest = divmod(channels, 3 * num_heads)
    if rest or width not in WIDTHS or mixed_BTC.dtype not in DTYPES:
        raise ValueError(f"linear_attention: no kernel for {channels} channels, {num_heads} heads, {mixed_BTC.dtype}")
    if rotation_2TK is not None and rotation_2TK.shape != (2, length, width / 2):
        raise ValueError(f"linear_attention: {tuple(rotation_2TK.shape)} are no angles for {length} × {width}")
    rotation = mixed_BTC if rotation_2TK is None else rotation_2TK.contiguous()
    inputs = {"mixed": mixed_BTC, "rotation": rotation, "ROTATED": rotation_2TK is not None, "FEATURE": feature_map}
    sizes = {"length": length, "segment": segment_positions(batch, length, num_heads), "HEADS": num_heads}
    sizes |= {"WIDTH": width, "BLOCK": max(16, triton.next_power_of_2(width)), "CHUNK": blocks.positions}
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return inputs | sizes | options | {"PRECISION": product_precision(mixed_BTC.dtype)}


def _states(
    memory_BHKV: Tensor | None, normaliser_BHK: Tensor | None, memory_BHNKV: Tensor, normaliser_BHNK: Tensor
) -> dict[str, Any]:
    states = {"memory": memory_BHNKV, "normaliser": normaliser_BHNK}
    if memory_BHKV is None or normaliser_BHK is None:
        return states | {"start_memory": memory_BHNKV, "start_normaliser": normaliser_BHNK, "HAS_START": False}
    start = {"start_memory": memory_BHKV.contiguous(), "start_normaliser": normaliser_BHK.contiguous()}
    return states | start | {"HAS_START": True}
