"""Depthwise causal convolution, with optional SiLU, in one pass over the memory each way. A program walks a segment of
one sequence with a window of rows in registers."""

# Triton cannot unpack into a tuple, and its kernels are no functions to a type checker.
# ruff: noqa: RUF005
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch

SIZES = range(2, 9)
"""Supported kernel sizes."""

DTYPES = (torch.float32, torch.bfloat16)


UNSPECIALIZED = ("length", "batch_of_group")
"""Arguments whose values do not specialise a kernel."""


class Blocks(NamedTuple):
    """Launch of the kernels; changes only the order of the weight gradient's sum. Channels and positions are per
    program; `rows` are loaded at once, to keep the memory busy."""

    channels: int
    positions: int
    rows: int
    num_warps: int


BLOCKS = Blocks(channels=256, positions=64, rows=8, num_warps=4)


def short_convolution(
    x_BTC: Tensor, weight_CW: Tensor, history_BWC: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Compute y_t = sum_i w_i x_(t - W + 1 + i) per channel, and SiLU of it if asked, in float32; y has x's dtype. The
    history has no gradient.

    Args:
        x_BTC: float32 or bfloat16.
        weight_CW: W is in `SIZES`.
        history_BWC: the W - 1 inputs before the first position; None for zeros.
    """
    return convolve(x_BTC, weight_CW[None], history_BWC, silu)


# The groups of weights are the first axis, which grows with the batch.
@custom_op("short_convolution", lambda x, *_: x.new_empty(x.shape))
def convolve(x_BTC: Tensor, weight_GCW: Tensor, history_BWC: Tensor | None, silu: bool) -> Tensor:
    """Convolve G equal runs of the batch, each with its own weights."""
    return launch_forward(x_BTC, weight_GCW, history_BWC, silu, BLOCKS)


@custom_op(
    "short_convolution_backward",
    lambda gradient, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.mT.shape, dtype=torch.float32)),
)
def convolve_backward(
    gradient_BTC: Tensor, x_BTC: Tensor, weight_GCW: Tensor, history_BWC: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of the weight, as (G, W, C) in float32."""
    return launch_backward(gradient_BTC, x_BTC, weight_GCW, history_BWC, silu, BLOCKS)


@gradient_of(convolve)
def _gradient(ctx: Any, gradient_BTC: Tensor) -> tuple[Tensor, Tensor]:
    if ctx.needs_input_grad[2]:
        raise NotImplementedError("short_convolution has no gradient for its history")
    of_x, of_weight_GWC = convolve_backward(gradient_BTC, *ctx.saved_tensors, *ctx.settings)
    return of_x, of_weight_GWC.mT


def launch_forward(x_BTC: Tensor, weight_GCW: Tensor, history_BWC: Tensor | None, silu: bool, blocks: Blocks) -> Tensor:
    y_BTC = torch.empty_like(x_BTC, memory_format=torch.contiguous_format)
    arguments = _arguments(x_BTC, weight_GCW, history_BWC, silu, blocks)
    launch(_forward, _grid(x_BTC, blocks), y=y_BTC, **arguments)
    return y_BTC


def launch_backward(
    gradient_BTC: Tensor, x_BTC: Tensor, weight_GCW: Tensor, history_BWC: Tensor | None, silu: bool, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    groups, channels, size = weight_GCW.shape
    of_x = torch.empty_like(x_BTC, memory_format=torch.contiguous_format)
    # A sum over parts, because atomic additions are not deterministic.
    parts = x_BTC.new_empty((_num_parts(x_BTC, blocks), size, channels), dtype=torch.float32)
    arguments = _arguments(x_BTC, weight_GCW, history_BWC, silu, blocks)
    launch(_backward, _grid(x_BTC, blocks), of_y=gradient_BTC.contiguous(), of_x=of_x, parts=parts, **arguments)
    return of_x, parts.unflatten(0, (groups, -1)).sum(1)


def _num_parts(x_BTC: Tensor, blocks: Blocks) -> int:
    return x_BTC.shape[0] * math.ceil(x_BTC.shape[1] / blocks.positions)


def _grid(x_BTC: Tensor, blocks: Blocks) -> tuple[int]:
    return (_num_parts(x_BTC, blocks) * math.ceil(x_BTC.shape[2] / blocks.channels),)


def _arguments(
    x_BTC: Tensor, weight_GCW: Tensor, history_BWC: Tensor | None, silu: bool, blocks: Blocks
) -> dict[str, Any]:
    batch, length, channels = x_BTC.shape
    groups, _, size = weight_GCW.shape
    if size not in SIZES or x_BTC.dtype not in DTYPES:
        raise ValueError(f"short_convolution: no kernel for size {size} in {x_BTC.dtype}")
    history = x_BTC if history_BWC is None else history_BWC.contiguous()
    inputs = {"x": x_BTC.contiguous(), "weight": weight_GCW.contiguous(), "history": history, "SILU": silu}
    inputs |= {"HAS_HISTORY": history_BWC is not None}
    sizes = {"length": length, "channels": channels, "batch_of_group": batch // groups, "SIZE": size}
    sizes |= {"BLOCK": blocks.channels, "POSITIONS": blocks.positions, "ROWS": blocks.rows}
    return inputs | sizes | {"num_warps": blocks.num_warps}


@triton.jit
def _place(length, channels, BLOCK: tl.constexpr, POSITIONS: tl.constexpr):
    """The grid is ordered as the memory."""
    num_blocks, num_segments = tl.cdiv(channels, BLOCK), tl.cdiv(length, POSITIONS)
    part = tl.program_id(0) // num_blocks
    channel = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    return part, part // num_segments, (part % num_segments) * POSITIONS, channel, channel < channels


@triton.jit
def _taps(weight, group, channels, channel, exists, SIZE: tl.constexpr):
    taps = ()
    for tap in tl.static_range(SIZE):
        address = weight + (group * channels + channel) * SIZE + tap
        taps = taps + (tl.load(address, mask=exists, other=0).to(tl.float32),)
    return taps


@triton.jit
def _rows_before(
    x, history, sequence, start, length, channels, channel, exists, SIZE: tl.constexpr, HAS_HISTORY: tl.constexpr
):
    """Return the SIZE - 1 rows before a segment, from the history or zeros at the sequence's start."""
    rows = ()
    for tap in tl.static_range(SIZE - 1):
        position = start - (SIZE - 1) + tap
        row = tl.load(_row(x, sequence, position, length, channels) + channel, mask=exists & (position >= 0), other=0)
        if HAS_HISTORY:
            address = _row(history, sequence, position + SIZE - 1, SIZE - 1, channels) + channel
            row = tl.where(position >= 0, row, tl.load(address, mask=exists & (position < 0), other=0).to(row.dtype))
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _row(x, sequence, position, length, channels):
    return x + (sequence.to(tl.int64) * length + position) * channels


@triton.jit
def _rows(x, sequence, first, length, channels, channel, exists, ROWS: tl.constexpr):
    """Load ROWS rows from `first` on, zeros past the end, before any is used."""
    rows = ()
    for row in tl.static_range(ROWS):
        address = _row(x, sequence, first + row, length, channels) + channel
        rows = rows + (tl.load(address, mask=exists & (first + row < length), other=0),)
    return rows


@triton.jit
def _weighted(window, taps, SIZE: tl.constexpr):
    total = window[0] * taps[0]
    for tap in tl.static_range(1, SIZE):
        total += window[tap] * taps[tap]
    return total


@triton.jit
def _weighted_backwards(window, taps, SIZE: tl.constexpr):
    total = window[0] * taps[SIZE - 1]
    for tap in tl.static_range(1, SIZE):
        total += window[tap] * taps[SIZE - 1 - tap]
    return total


@triton.jit
def _through_silu(of_y, window, taps, SIZE: tl.constexpr, SILU: tl.constexpr):
    gradient = of_y.to(tl.float32)
    if SILU:
        total = _weighted(window, taps, SIZE)
        sigmoid = tl.sigmoid(total)
        gradient *= sigmoid * (1 + total * (1 - sigmoid))
    return gradient


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward(
    x, weight, history, y, length, channels, batch_of_group,
    SIZE: tl.constexpr, HAS_HISTORY: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    _, sequence, start, channel, exists = _place(length, channels, BLOCK, POSITIONS)
    taps = _taps(weight, sequence // batch_of_group, channels, channel, exists, SIZE)
    window = _rows_before(x, history, sequence, start, length, channels, channel, exists, SIZE, HAS_HISTORY)
    for first in range(start, min(start + POSITIONS, length), ROWS):
        rows = _rows(x, sequence, first, length, channels, channel, exists, ROWS)
        for row in tl.static_range(ROWS):
            window = window + (rows[row].to(tl.float32),)
            total = _weighted(window, taps, SIZE)
            window = window[1:]
            if SILU:
                total *= tl.sigmoid(total)
            address = _row(y, sequence, first + row, length, channels) + channel
            tl.store(address, total.to(y.dtype.element_ty), mask=exists & (first + row < length))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _backward(
    x, weight, history, of_y, of_x, parts, length, channels, batch_of_group,
    SIZE: tl.constexpr, HAS_HISTORY: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute, with p the sum before SiLU and dp its gradient:

        dx_t = sum_i w_i dp_(t + W - 1 - i),   dw_i = sum_t dp_t x_(t - W + 1 + i)

    dx of a position is known W - 1 steps later. So the walk continues W - 1 positions into the next segment, whose dp
    does not count in dw.
    """
    part, sequence, start, channel, exists = _place(length, channels, BLOCK, POSITIONS)
    taps = _taps(weight, sequence // batch_of_group, channels, channel, exists, SIZE)
    window = _rows_before(x, history, sequence, start, length, channels, channel, exists, SIZE, HAS_HISTORY)
    nothing = tl.zeros([BLOCK], tl.float32)
    of_taps, of_sums = (nothing,), ()
    for _ in tl.static_range(SIZE - 1):
        of_taps, of_sums = of_taps + (nothing,), of_sums + (nothing,)
    num_steps = tl.cdiv(min(POSITIONS, length - start), ROWS)
    for step in range(num_steps):
        first = start + step * ROWS
        rows = _rows(x, sequence, first, length, channels, channel, exists, ROWS)
        upstream = _rows(of_y, sequence, first, length, channels, channel, exists, ROWS)
        for row in tl.static_range(ROWS):
            window = window + (rows[row].to(tl.float32),)
            of_sum = _through_silu(upstream[row], window, taps, SIZE, SILU)
            of_sums = of_sums + (of_sum,)
            position = first + row - (SIZE - 1)
            address = _row(of_x, sequence, position, length, channels) + channel
            total = _weighted_backwards(of_sums, taps, SIZE).to(of_x.dtype.element_ty)
            tl.store(address, total, mask=exists & (position >= start) & (position < length))
            more = ()
            for tap in tl.static_range(SIZE):
                more = more + (of_taps[tap] + of_sum * window[tap],)
            of_taps, of_sums, window = more, of_sums[1:], window[1:]
    after = start + num_steps * ROWS
    rows = _rows(x, sequence, after, length, channels, channel, exists, SIZE - 1)
    upstream = _rows(of_y, sequence, after, length, channels, channel, exists, SIZE - 1)
    for row in tl.static_range(SIZE - 1):
        window = window + (rows[row].to(tl.float32),)
        of_sums = of_sums + (_through_silu(upstream[row], window, taps, SIZE, SILU),)
        position = after + row - (SIZE - 1)
        address = _row(of_x, sequence, position, length, channels) + channel
        total = _weighted_backwards(of_sums, taps, SIZE).to(of_x.dtype.element_ty)
        tl.store(address, total, mask=exists & (position >= start) & (position < length))
        of_sums, window = of_sums[1:], window[1:]
    for tap in tl.static_range(SIZE):
        tl.store(parts + (part.to(tl.int64) * SIZE + tap) * channels + channel, of_taps[tap], mask=exists)
