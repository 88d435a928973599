"""Rows of an embedding, with a gradient that is summed in one order, so that two trainings are alike to the bit.

Torch's compiler adds every position's gradient to its symbol's row by atomics, in the order in which they happen to
arrive. Here the sum is a product with a matrix that has a one where position n holds symbol v, made in registers: exact
products, and a sum whose order shape and tokens decide. Positions of which none holds one of a program's symbols are
passed over: most of them, as symbols are in the order of code points and texts mostly written in the first hundred.
With more than MAX_SYMBOLS symbols the positions are sorted by symbol first, as torch does uncompiled, an order as
fixed; docs/kernels.md has the times of both.
"""

# Launching a kernel gives plain numbers for its constexpr arguments, and a decorated function is not seen to return.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.blocks import BLOCK, block_in_rows
from attnbench.kernels.launching import launch, register_fake
from attnbench.kernels.products import product

MAX_SYMBOLS = 2048

MIN_ROWS = 1024
"""Positions that a program sums at least."""

MAX_PART_NUMBERS = 1 << 24
"""Numbers in all parts of the sum together. Not the device's size decides how many parts there are, which would let two
devices add in different orders."""

SYMBOLS, COLUMNS = 128, 64
"""The block that a program sums."""

ROW_BYTES = 256
"""It takes at a time as many positions as numbers fit into so many bytes: 128 in bfloat16, 64 in float32."""


@torch.library.custom_op("attnbench::embed", mutates_args=())
def embed(tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Row `tokens_N` of the weight for every position, (N, D), in `dtype`; of a token that has none, not a number."""
    num_symbols, width = weight_VD.shape
    rows_ND = weight_VD.new_empty(tokens_N.shape[0], width, dtype=dtype)
    grid, inputs = (-(-rows_ND.numel() // BLOCK),), (weight_VD.to(dtype).contiguous(), tokens_N.contiguous())
    launch(_take_rows, grid, *inputs, rows_ND, num_symbols, *rows_ND.shape, BLOCK=BLOCK)
    return rows_ND


@torch.library.custom_op("attnbench::embedding_gradient", mutates_args=())
def embedding_gradient(gradient_ND: Tensor, tokens_N: Tensor, num_symbols: int) -> Tensor:
    """The sum of the rows of each symbol's positions, (V, D) in float32.

    Args:
        gradient_ND: of a float dtype. One that is not finite makes more of its column so than it is added to.
    """
    if num_symbols > MAX_SYMBOLS:
        return torch.ops.aten.embedding_dense_backward(gradient_ND.float(), tokens_N, num_symbols, -1, False)
    num_rows, width = gradient_ND.shape
    blocks = (-(-num_symbols // SYMBOLS), -(-width // COLUMNS))
    num_parts = max(1, min(MAX_PART_NUMBERS // (num_symbols * width), num_rows // MIN_ROWS))
    parts = torch.empty(num_parts, num_symbols, width, dtype=torch.float32, device=gradient_ND.device)
    launch(
        _sum_rows,
        (*blocks, num_parts),
        gradient_ND.contiguous(),
        tokens_N.contiguous(),
        parts,
        num_rows,
        num_symbols,
        width,
        -(-num_rows // num_parts),
        PRECISION="tf32x3" if gradient_ND.dtype == torch.float32 else "tf32",
        SYMBOLS=SYMBOLS,
        ROWS=ROW_BYTES // gradient_ND.element_size(),
        COLUMNS=COLUMNS,
    )
    return parts[0] if num_parts == 1 else parts.sum(0)


@register_fake(embed)
def _(tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    return weight_VD.new_empty(tokens_N.shape[0], weight_VD.shape[1], dtype=dtype)


@register_fake(embedding_gradient)
def _(gradient_ND: Tensor, tokens_N: Tensor, num_symbols: int) -> Tensor:
    return gradient_ND.new_empty(num_symbols, gradient_ND.shape[1], dtype=torch.float32)


def _save_for_gradient(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    tokens_N, weight_VD, _ = inputs
    ctx.save_for_backward(tokens_N)
    ctx.num_symbols, ctx.weight_dtype = weight_VD.shape[0], weight_VD.dtype


def _gradient(ctx: Any, gradient_ND: Tensor) -> tuple[None, Tensor, None]:
    (tokens_N,) = ctx.saved_tensors
    return None, embedding_gradient(gradient_ND, tokens_N, ctx.num_symbols).to(ctx.weight_dtype), None


embed.register_autograd(_gradient, setup_context=_save_for_gradient)


@embed.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], tokens: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Stacked models: their tokens number rows of one weight that has all of theirs."""
    tokens, weight = _stacked(tokens, in_dims[0], info.batch_size), _stacked(weight, in_dims[1], info.batch_size)
    first = torch.arange(info.batch_size, device=tokens.device)[:, None] * weight.shape[1]
    return embed((tokens + first).flatten(), weight.flatten(0, 1), dtype).unflatten(0, tokens.shape), 0


@embedding_gradient.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, tokens: Tensor, num_symbols: int
) -> tuple[Tensor, int]:
    """One model after the other: a product for all would be with zeros but for one in so many."""
    gradient, tokens = _stacked(gradient, in_dims[0], info.batch_size), _stacked(tokens, in_dims[1], info.batch_size)
    each = [embedding_gradient(*pair, num_symbols) for pair in zip(gradient.unbind(), tokens.unbind(), strict=True)]
    return torch.stack(each), 0


def _stacked(x: Tensor, axis: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


@triton.jit
def _take_rows(weight, tokens, rows, num_symbols, num_rows, width, BLOCK: tl.constexpr):
    """Not a number where a token has no row, rather than what lies beyond the weight."""
    row, index, rows_on = block_in_rows(width, BLOCK)
    there = row + rows_on < num_rows
    token = tl.load(tokens + row + rows_on, mask=there, other=0)
    is_symbol = (token >= 0) & (token < num_symbols)
    taken = tl.load(weight + token * width + index % width, mask=there & is_symbol, other=float("nan"))
    tl.store(rows + row * width + index, taken, mask=there)


@triton.jit
def _sum_rows(gradient, tokens, parts, num_rows, num_symbols, width, rows_a_part,
              PRECISION: tl.constexpr, SYMBOLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute, of one part of the rows, the sums for some symbols and columns. Grid: symbols, columns, parts."""
    first = tl.program_id(0) * SYMBOLS
    symbol, column = first + tl.arange(0, SYMBOLS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
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
    address = (part.to(tl.int64) * num_symbols + symbol)[:, None] * width + column[None, :]
    tl.store(parts + address, total, mask=(symbol < num_symbols)[:, None] & (column < width)[None, :])
