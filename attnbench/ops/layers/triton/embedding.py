"""Embedding lookup with a deterministic gradient.

Torch's compiler adds gradients by atomics, in any order. Here the sum is a product with a one-hot matrix made in
registers, which skips blocks of positions without any of a program's symbols. With more than MAX_SYMBOLS symbols
positions are sorted by symbol, as in uncompiled torch; docs/kernels.md has the times of both.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.blocks import BLOCK, block_in_rows
from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch
from attnbench.ops.common.triton.products import product

MAX_SYMBOLS = 2048

MIN_ROWS = 1024
"""Least positions per part of the sum."""

MAX_PART_NUMBERS = 1 << 24
"""Numbers in all parts together. Independent of the device, so that all devices add in one order."""

SYMBOLS, COLUMNS = 128, 64
"""A program's block of the sum."""

ROW_BYTES = 256
"""Bytes per column of positions at a time: 128 positions in bfloat16, 64 in float32."""


def embed(tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return row `tokens_N` of the weight, (N, D), in `dtype`; NaN for tokens without a row."""
    return _of_models(tokens_N[None], weight_VD[None], dtype).squeeze(0)


@custom_op("embed", lambda tokens, weight, dtype: weight.new_empty(*tokens.shape, weight.shape[2], dtype=dtype))
def _of_models(tokens_MN: Tensor, weight_MVD: Tensor, dtype: torch.dtype) -> Tensor:
    """`embed` of M models, each with its positions and weights: (M, N, D)."""
    num_models, num_symbols, width = weight_MVD.shape
    rows_MND = weight_MVD.new_empty(*tokens_MN.shape, width, dtype=dtype)
    inputs = weight_MVD.to(dtype).contiguous(), _as_one(tokens_MN, num_symbols).contiguous()
    grid, sizes = (-(-rows_MND.numel() // BLOCK),), (num_models * num_symbols, tokens_MN.numel(), width)
    launch(_take_rows, grid, *inputs, rows_MND, *sizes, BLOCK=BLOCK)
    return rows_MND


@custom_op(
    "embedding_gradient",
    lambda gradient, tokens, num_symbols: gradient.new_empty(
        gradient.shape[0], num_symbols, gradient.shape[2], dtype=torch.float32
    ),
)
def embedding_gradient(gradient_MND: Tensor, tokens_MN: Tensor, num_symbols: int) -> Tensor:
    """Return the sum of each symbol's gradients, (M, V, D) in float32. A non-finite gradient may spread within its
    column and model."""
    num_models, num_rows, width = gradient_MND.shape
    if num_symbols > MAX_SYMBOLS:
        rows, tokens = gradient_MND.flatten(0, 1).float(), _as_one(tokens_MN, num_symbols).flatten()
        all_symbols = num_models * num_symbols
        sums = torch.ops.aten.embedding_dense_backward(rows, tokens, all_symbols, -1, False)
        return sums.unflatten(0, (num_models, num_symbols))
    blocks = (-(-num_symbols // SYMBOLS), -(-width // COLUMNS))
    most_parts = MAX_PART_NUMBERS // (num_models * num_symbols * width)
    num_parts = max(1, min(most_parts, num_rows // MIN_ROWS))
    parts = gradient_MND.new_empty(num_models, num_parts, num_symbols, width, dtype=torch.float32)
    launch(
        _sum_rows, (*blocks, num_models * num_parts), gradient_MND.contiguous(), tokens_MN.contiguous(), parts,
        num_rows, num_symbols, width, -(-num_rows // num_parts), num_parts,
        PRECISION="tf32x3" if gradient_MND.dtype == torch.float32 else "tf32",
        SYMBOLS=SYMBOLS, ROWS=ROW_BYTES // gradient_MND.element_size(), COLUMNS=COLUMNS,
    )  # fmt: skip
    return parts[:, 0] if num_parts == 1 else parts.sum(1)


def _as_one(tokens_MN: Tensor, num_symbols: int) -> Tensor:
    if len(tokens_MN) == 1:
        return tokens_MN
    return tokens_MN + num_symbols * torch.arange(len(tokens_MN), device=tokens_MN.device)[:, None]


@gradient_of(_of_models, unsaved=(1,))
def _gradient(ctx: Any, gradient_MND: Tensor) -> tuple[None, Tensor]:
    return None, embedding_gradient(gradient_MND, *ctx.saved_tensors, ctx.shapes[0][1])


@triton.jit
def _take_rows(weight, tokens, rows, num_symbols, num_rows, width, BLOCK: tl.constexpr):
    """Write NaN for tokens without a row, instead of memory beyond the weight."""
    row, index, rows_on = block_in_rows(width, BLOCK)
    there = row + rows_on < num_rows
    token = tl.load(tokens + row + rows_on, mask=there, other=0)
    is_symbol = (token >= 0) & (token < num_symbols)
    taken = tl.load(weight + token * width + index % width, mask=there & is_symbol, other=float("nan"))
    tl.store(rows + row * width + index, taken, mask=there)


@triton.jit
def _sum_rows(gradient, tokens, parts, num_rows, num_symbols, width, rows_a_part, num_parts,
              PRECISION: tl.constexpr, SYMBOLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum one part of a model's rows for some symbols and columns. Grid: symbols, columns, parts of all models."""
    first = tl.program_id(0) * SYMBOLS
    symbol, column = first + tl.arange(0, SYMBOLS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part, model = tl.program_id(2) % num_parts, (tl.program_id(2) // num_parts).to(tl.int64)
    gradient, tokens = gradient + model * num_rows * width, tokens + model * num_rows
    end = tl.minimum((part + 1) * rows_a_part, num_rows)
    total = tl.zeros((SYMBOLS, COLUMNS), tl.float32)
    for start in range(part * rows_a_part, end, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = tl.load(tokens + row, mask=row < end, other=-1) - first
        if tl.max(((offset >= 0) & (offset < SYMBOLS)).to(tl.int32), 0) > 0:
            there = (row < end)[:, None] & (column < width)[None, :]
            given = tl.load(gradient + row.to(tl.int64)[:, None] * width + column[None, :], mask=there, other=0.0)
            is_same = tl.where(tl.arange(0, SYMBOLS)[:, None] == offset[None, :], 1.0, 0.0).to(given.dtype)
            total = product(is_same, given, PRECISION, total)
    address = (tl.program_id(2).to(tl.int64) * num_symbols + symbol)[:, None] * width + column[None, :]
    tl.store(parts + address, total, mask=(symbol < num_symbols)[:, None] & (column < width)[None, :])
