"""Cumulative sums of log forget gates in float64, for FlashAttention's kernels.

C_t = log f_1 + ... + log f_t,   dL/d(log f_s) = sum_(t >= s) dL/dC_t
"""

# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch

BLOCK = 1024
"""Largest number of positions that a program sums at once."""


@triton.jit(do_not_specialize=["length"])
def cumulative_sum_kernel(
    source, source_strides, result, result_strides, length,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Strides are along B, H and T. REVERSE sums from the last position back."""
    batch, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    source += batch * source_strides[0] + head * source_strides[1]
    result += batch * result_strides[0] + head * result_strides[1]
    num_blocks = tl.cdiv(length, BLOCK)
    # Gives the sum a dtype before the first block.
    before = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    for index in range(num_blocks):
        block = num_blocks - 1 - index if REVERSE else index
        position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(source + position * source_strides[2], mask=position < length, other=0.0).to(tl.float64)
        sums = before + tl.cumsum(x, 0, reverse=REVERSE)
        tl.store(result + position * result_strides[2], sums.to(result.dtype.element_ty), mask=position < length)
        before += tl.sum(x, 0)


def _sum_up(source_BHT: Tensor, result_BHT: Tensor, *, reverse: bool) -> None:
    B, H, T = source_BHT.shape
    with torch.cuda.device_of(source_BHT):
        launch(
            cumulative_sum_kernel,
            (B * H,),
            *(source_BHT, source_BHT.stride(), result_BHT, result_BHT.stride(), T),
            HEADS=H,
            BLOCK=BLOCK if T > BLOCK // 4 else BLOCK // 4,
            REVERSE=reverse,
        )


def _turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.mT.shape, dtype=dtype)


@custom_op("cumulative_log_forget", lambda log_forget: _turned(log_forget, torch.float64))
def cumulative_log_forget(log_forget_BTH: Tensor) -> Tensor:
    """Return C, (B, H, T) in float64, of float32 log f."""
    if log_forget_BTH.dtype != torch.float32:
        raise TypeError(f"log f is {log_forget_BTH.dtype}, must be float32")
    cumulative_BHT = _turned(log_forget_BTH, torch.float64)
    _sum_up(log_forget_BTH.mT, cumulative_BHT, reverse=False)
    return cumulative_BHT


@custom_op("cumulative_log_forget_backward", lambda gradient: _turned(gradient, torch.float32))
def _backward(gradient_BHT: Tensor) -> Tensor:
    log_forget_gradient_BTH = _turned(gradient_BHT, torch.float32)
    _sum_up(gradient_BHT, log_forget_gradient_BTH.mT, reverse=True)
    return log_forget_gradient_BTH


@gradient_of(cumulative_log_forget, unsaved=(0,))
def _gradient(ctx: Any, gradient_BHT: Tensor) -> Tensor:
    return _backward(gradient_BHT)
