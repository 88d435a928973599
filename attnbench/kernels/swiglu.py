"""silu(gate) × up, the gate of a SwiGLU, from one tensor that holds both, and its gradient as one tensor.

With both in one tensor their projections are one matrix product, forward and backward. Torch's compiler, left to
itself, then spends a pass over the memory on putting the two gradients side by side.
"""

# Launching a kernel gives plain numbers for its constexpr arguments.
# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.batching import join_the_batch

BLOCK_ROWS, BLOCK_CHANNELS = 2, 1024
"""Long rows: on an H200 within 8 % of the memory's speed, where blocks of 16 × 128 stay 30 % below it."""


@torch.library.custom_op("attnbench::swiglu", mutates_args=())
def swiglu(packed_NF: Tensor) -> Tensor:
    """silu(first half) × second half of the last axis, computed in float32: (N, 2 F) to (N, F), in the dtype given."""
    num_rows, width = packed_NF.shape[0], packed_NF.shape[1] // 2
    mixed_NF = packed_NF.new_empty(num_rows, width)
    _forward[_grid(num_rows, width)](
        packed_NF.contiguous(), mixed_NF, num_rows, width, ROWS=BLOCK_ROWS, CHANNELS=BLOCK_CHANNELS
    )
    return mixed_NF


@torch.library.custom_op("attnbench::swiglu_backward", mutates_args=())
def swiglu_backward(gradient_NF: Tensor, packed_NF: Tensor) -> Tensor:
    """The gradient of `packed_NF`, (N, 2 F)."""
    num_rows, width = gradient_NF.shape
    packed_gradient = torch.empty_like(packed_NF, memory_format=torch.contiguous_format)
    _backward[_grid(num_rows, width)](
        gradient_NF.contiguous(),
        packed_NF.contiguous(),
        packed_gradient,
        num_rows,
        width,
        ROWS=BLOCK_ROWS,
        CHANNELS=BLOCK_CHANNELS,
    )
    return packed_gradient


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return -(-num_rows // BLOCK_ROWS), -(-width // BLOCK_CHANNELS)


@swiglu.register_fake
def _(packed_NF: Tensor) -> Tensor:
    return packed_NF.new_empty(packed_NF.shape[0], packed_NF.shape[1] // 2)


@swiglu_backward.register_fake
def _(gradient_NF: Tensor, packed_NF: Tensor) -> Tensor:
    return torch.empty_like(packed_NF, memory_format=torch.contiguous_format)


def _save_for_gradient(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, gradient_NF: Tensor) -> Tensor:
    return swiglu_backward(gradient_NF, *ctx.saved_tensors)


swiglu.register_autograd(_gradient, setup_context=_save_for_gradient)


join_the_batch(swiglu)
join_the_batch(swiglu_backward)


@triton.jit
def _forward(packed, mixed, num_rows, width, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = (row < num_rows) & (channel < width)
    gate = tl.load(packed + row * 2 * width + channel, mask=there, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(mixed + row * width + channel, gate * tl.sigmoid(gate) * up, mask=there)


@triton.jit
def _backward(gradient, packed, packed_gradient, num_rows, width, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = (row < num_rows) & (channel < width)
    given = tl.load(gradient + row * width + channel, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(packed + row * 2 * width + channel, mask=there, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + channel, mask=there, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = given * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(packed_gradient + row * 2 * width + channel, of_gate, mask=there)
    tl.store(packed_gradient + row * 2 * width + width + channel, given * gate * sigmoid, mask=there)
