"""RMSNorm for uncompiled steps: forward and gradient in one pass over the memory each. Torch's gradient of the weight
takes ten times as long, a fifth of an uncompiled step of recall's models (float32, 65,536 positions of 64 channels,
H100). Compiled steps use torch's RMSNorm, which is fused with its surroundings."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch

NUMBERS = 2048
"""Numbers per program, rounded down to whole rows."""

MAX_PARTS = 1024
"""Most parts of a model's rows; a program sums the weight's gradient over each. Independent of the device, so that all
devices add in one order."""


@custom_op("rms_norm", lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x_ND: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    """Return weight × x / sqrt(mean(x²) + eps) of each row, computed in float32: (N, D), in x's dtype.

    Args:
        x_ND: may be a slice of wider rows.
        weight_RD: of R stacked models, rounded to x's dtype; each has an equal part of the rows, in order.
    """
    x_ND, stride = _rows(x_ND)
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    num_rows, options = x_ND.shape[0] // len(weight_RD), _block(x_ND)
    grid = (-(-num_rows // options["ROWS"]), len(weight_RD))
    launch(rms_norm_kernel, grid, x_ND, weight_RD.contiguous(), y_ND, num_rows, x_ND.shape[1], stride, eps, **options)
    return y_ND


@custom_op(
    "rms_norm_backward",
    lambda gradient, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)),
)
def rms_norm_backward(gradient_ND: Tensor, x_ND: Tensor, weight_RD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, (N, D), and of the weights, (R, D) in float32: with n = x r, r = 1 / sqrt(mean(x²) +
    eps) and g = dL/dy, per row

        dL/dx = r (g w - n mean(g w n)),   dL/dw = sum over rows of g n
    """
    x_ND, stride = _rows(x_ND)
    of_x = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    num_models, width = weight_RD.shape
    num_rows, options = len(x_ND) // num_models, _block(x_ND)
    num_blocks = -(-num_rows // options["ROWS"])
    blocks_a_part = -(-num_blocks // MAX_PARTS)
    num_parts = -(-num_blocks // max(1, blocks_a_part))
    parts = torch.empty(num_models, num_parts, width, dtype=torch.float32, device=x_ND.device)
    inputs = gradient_ND.contiguous(), x_ND, weight_RD.contiguous()
    sizes = num_rows, width, stride, blocks_a_part * options["ROWS"]
    launch(rms_norm_gradient_kernel, (num_parts, num_models), *inputs, of_x, parts, *sizes, eps, **options)
    return of_x, parts.sum(1)


def _rows(x_ND: Tensor) -> tuple[Tensor, int]:
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    return x_ND, x_ND.stride(0)


def _block(x_ND: Tensor) -> dict[str, Any]:
    columns = triton.next_power_of_2(x_ND.shape[1])
    return {"ROWS": max(1, NUMBERS // columns), "COLUMNS": columns, "num_warps": min(16, max(4, columns // 512))}


@gradient_of(rms_norm)
def _gradient(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(gradient_ND, *ctx.saved_tensors, *ctx.settings)


@triton.jit
def unit_rows(x, address, there, width, eps):
    """Return rows over their root mean square, and one over that root, (rows, 1)."""
    given = tl.load(x + address, mask=there, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(given * given, axis=1, keep_dims=True) / width + eps)
    return given * scale, scale


@triton.jit
def rms_norm_kernel(x, weight, y, num_rows, width, stride, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: blocks of a model's rows, models."""
    model, column = tl.program_id(1).to(tl.int64), tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[:, None] & (column < width)[None, :]
    row = (model * num_rows + row)[:, None]
    unit, _ = unit_rows(x, row * stride + column[None, :], there, width, eps)
    gain = tl.load(weight + model * width + column, mask=column < width, other=0.0)
    gain = gain.to(x.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column[None, :], unit * gain[None, :], mask=there)


@triton.jit
def rms_norm_gradient_kernel(gradient, x, weight, of_x, parts, num_rows, width, stride, rows_a_part, eps,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Grid: parts of a model's rows, models."""
    part, model, column = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, COLUMNS)
    gain = tl.load(weight + model * width + column, mask=column < width, other=0.0)
    gain = gain.to(x.dtype.element_ty).to(tl.float32)
    end = tl.minimum((part + 1) * rows_a_part, num_rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(part * rows_a_part, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < end)[:, None] & (column < width)[None, :]
        row = (model * num_rows + row)[:, None]
        address = row * width + column[None, :]
        unit, scale = unit_rows(x, row * stride + column[None, :], there, width, eps)
        given = tl.load(gradient + address, mask=there, other=0.0).to(tl.float32)
        mean = tl.sum(given * gain[None, :] * unit, axis=1, keep_dims=True) / width
        tl.store(of_x + address, scale * (given * gain[None, :] - unit * mean), mask=there)
        total += given * unit
    address = (model * tl.num_programs(0) + part) * width + column
    tl.store(parts + address, tl.sum(total, axis=0), mask=column < width)
