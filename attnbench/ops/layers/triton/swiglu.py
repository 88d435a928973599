# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.blocks import BLOCK, block_in_rows
from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch


@custom_op("swiglu", lambda packed: packed.new_empty(packed.shape[0], packed.shape[1] // 2))
def swiglu(packed_NF: Tensor) -> Tensor:
    """Return silu(first half) × second half of the last axis, computed in float32: (N, 2 F) to (N, F).

    Both projections are one matrix product, forward and backward, and the packed tensor has one packed gradient.
    """
    num_rows, width = packed_NF.shape[0], packed_NF.shape[1] // 2
    mixed_NF = packed_NF.new_empty(num_rows, width)
    grid = (-(-mixed_NF.numel() // BLOCK),)
    launch(swiglu_kernel, grid, packed_NF.contiguous(), mixed_NF, num_rows, width, BLOCK=BLOCK)
    return mixed_NF


@custom_op("swiglu_backward", lambda gradient, packed: packed.new_empty(packed.shape))
def swiglu_backward(gradient_NF: Tensor, packed_NF: Tensor) -> Tensor:
    num_rows, width = gradient_NF.shape
    packed_gradient = torch.empty_like(packed_NF, memory_format=torch.contiguous_format)
    grid, inputs = (-(-gradient_NF.numel() // BLOCK),), (gradient_NF.contiguous(), packed_NF.contiguous())
    launch(swiglu_gradient_kernel, grid, *inputs, packed_gradient, num_rows, width, BLOCK=BLOCK)
    return packed_gradient


@gradient_of(swiglu)
def _gradient(ctx: Any, gradient_NF: Tensor) -> Tensor:
    return swiglu_backward(gradient_NF, *ctx.saved_tensors)


@triton.jit
def _addresses(num_rows, width, BLOCK: tl.constexpr):
    """Return addresses of a program's numbers in (num_rows, width), of their gates in (num_rows, 2 width), and which
    exist."""
    row, index, rows_on = block_in_rows(width, BLOCK)
    return row * width + index, row * 2 * width + (index + rows_on * width), row + rows_on < num_rows


@triton.jit
def swiglu_kernel(packed, mixed, num_rows, width, BLOCK: tl.constexpr):
    single, gated, there = _addresses(num_rows, width, BLOCK)
    gate = tl.load(packed + gated, mask=there, other=0.0).to(tl.float32)
    up = tl.load(packed + gated + width, mask=there, other=0.0).to(tl.float32)
    tl.store(mixed + single, gate * tl.sigmoid(gate) * up, mask=there)


@triton.jit
def swiglu_gradient_kernel(gradient, packed, packed_gradient, num_rows, width, BLOCK: tl.constexpr):
    single, gated, there = _addresses(num_rows, width, BLOCK)
    given = tl.load(gradient + single, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(packed + gated, mask=there, other=0.0).to(tl.float32)
    up = tl.load(packed + gated + width, mask=there, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = given * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(packed_gradient + gated, of_gate, mask=there)
    tl.store(packed_gradient + gated + width, given * gate * sigmoid, mask=there)
