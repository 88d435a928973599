"""A query and a key that all heads share, made into those of each head as Mamba-3 has them, in a pass over the memory
each way, from where the projection left them: normed over their channels, shifted by a bias of the head, and turned by
an angle of position, head and channel pair.

    s_h = gain x / sqrt(mean(x²) + eps) + bias_h,   channels (2a, 2a + 1) of y_h: those of s_h, turned by angle_h,a

Pairs after the last angle are not turned. Left to single operations, every head's query and key go through the memory
several times.
"""

# Launching a kernel gives plain numbers for its constexpr arguments, and a decorated function is not seen to return.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.batching import join_the_batch
from attnbench.kernels.launching import launch, register_fake
from attnbench.kernels.rms_norm import unit_rows
from attnbench.kernels.rotary import padded_width

ROWS = 32
"""Positions of a program."""


@torch.library.custom_op("attnbench::turned_heads", mutates_args=())
def turned_heads(packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float) -> Tensor:
    """Query and key of every head, and value, side by side as `scalar_decay` reads them: (B, T, HK + HK + HV), in the
    dtype given, computed in float32.

    Args:
        packed_BTC: the one query, the one key, and the values of all heads, (B, T, K + K + HV).
        gain_R2K, bias_R2HK: of query and key; one of each of R stacked models, to which equal parts of the batch
            belong, in order.
        angle_BTHA: float32, of the first A of K / 2 pairs of channels, query's and key's alike.
    """
    packed_BTC = packed_BTC.contiguous()
    heads_BTC = _new_heads(packed_BTC, bias_R2HK)
    num_rows, shape = _shape(packed_BTC, bias_R2HK, angle_BTHA)
    inputs = packed_BTC, gain_R2K.contiguous(), bias_R2HK.contiguous(), angle_BTHA.contiguous()
    with torch.cuda.device_of(packed_BTC):
        launch(turned_heads_kernel, (-(-num_rows // ROWS), len(gain_R2K)), *inputs, heads_BTC, num_rows, eps, **shape)
    return heads_BTC


@torch.library.custom_op("attnbench::turned_heads_backward", mutates_args=())
def turned_heads_backward(
    gradient_BTC: Tensor, packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `turned_heads`: of what is packed, in its dtype, and of gain, bias and angle in float32.

    With g_h the gradient of y_h turned back, and n the normed x before the gain, r its factor:

        dL/dbias_h = sum over positions of g_h,   G = sum over heads of g_h,   dL/dgain = sum over positions of G n
        dL/dx = r (G gain - n mean(G gain n)),   dL/dangle = y'_0 dL/dy_1 - y'_1 dL/dy_0 of a pair, of query and key
    """
    packed_BTC = packed_BTC.contiguous()
    num_rows, shape = _shape(packed_BTC, bias_R2HK, angle_BTHA)
    num_models, num_blocks = len(gain_R2K), -(-num_rows // ROWS)
    of_packed, of_angle = torch.empty_like(packed_BTC), torch.empty_like(angle_BTHA, dtype=torch.float32)
    # A sum a block of positions, and those summed up in their order: the same bits twice.
    of_gain, of_bias = (
        x.new_empty(num_models, num_blocks, *x.shape[1:], dtype=torch.float32) for x in (gain_R2K, bias_R2HK)
    )
    inputs = (x.contiguous() for x in (gradient_BTC, packed_BTC, gain_R2K, bias_R2HK, angle_BTHA))
    results = of_packed, of_gain, of_bias, of_angle
    with torch.cuda.device_of(packed_BTC):
        launch(turned_heads_gradient_kernel, (num_blocks, num_models), *inputs, *results, num_rows, eps, **shape)
    return of_packed, of_gain.sum(1), of_bias.sum(1), of_angle


def _shape(packed_BTC: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the positions of a model, and what a kernel is compiled for."""
    num_models, _, num_heads, width = bias_R2HK.shape
    num_rows = packed_BTC.shape[0] * packed_BTC.shape[1] // num_models
    padded = padded_width(width)
    sizes = {"HEADS": num_heads, "WIDTH": width, "PADDED": padded, "ANGLES": angle_BTHA.shape[3]}
    # Eight channels a thread: with twice as many, the gradient takes all registers that a thread can have.
    sizes |= {"VALUES": packed_BTC.shape[2] - 2 * width, "ROWS": ROWS, "num_warps": padded // 8}
    return num_rows, sizes


def _new_heads(packed_BTC: Tensor, bias_R2HK: Tensor) -> Tensor:
    num_heads, width = bias_R2HK.shape[2:]
    return packed_BTC.new_empty(*packed_BTC.shape[:2], packed_BTC.shape[2] + 2 * (num_heads - 1) * width)


@register_fake(turned_heads)
def _(packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float) -> Tensor:
    return _new_heads(packed_BTC, bias_R2HK)


@register_fake(turned_heads_backward)
def _(
    gradient_BTC: Tensor, packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_gain, of_bias, of_angle = (x.new_empty(x.shape, dtype=torch.float32) for x in (gain_R2K, bias_R2HK, angle_BTHA))
    return packed_BTC.new_empty(packed_BTC.shape), of_gain, of_bias, of_angle


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, gradient_BTC: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    results = turned_heads_backward(gradient_BTC, *tensors, ctx.eps)
    return (*(result.to(x.dtype) for result, x in zip(results, tensors, strict=True)), None)


turned_heads.register_autograd(_gradient, setup_context=_save_for_gradient)


join_the_batch(turned_heads)
join_the_batch(turned_heads_backward)


@triton.jit
def _pairs(x, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The first channels and the second ones of pairs (2i, 2i + 1)."""
    return tl.split(tl.reshape(x, [ROWS, PADDED // 2, 2]))


@triton.jit
def _joined(first, second, ROWS: tl.constexpr, PADDED: tl.constexpr):
    return tl.reshape(tl.join(first, second), [ROWS, PADDED])


@triton.jit
def _turned(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _copy_values(source, target, row, inside, source_keys, target_keys, VALUES: tl.constexpr, PADDED: tl.constexpr):
    """The last VALUES channels of rows, behind so many of query and key, to the last ones of other rows."""
    source += row * (source_keys + VALUES) + source_keys
    target += row * (target_keys + VALUES) + target_keys
    for first in range(0, VALUES, PADDED):
        channel = first + tl.arange(0, PADDED)[None, :]
        there = inside & (channel < VALUES)
        tl.store(target + channel, tl.load(source + channel, mask=there), mask=there)


@triton.jit
def _places(num_rows, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUES: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    """The model, rows and whether they are there, and of a query's or key's channels the same; their addresses in what
    is packed, and in what is by heads."""
    model, channel = tl.program_id(1).to(tl.int64), tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, within = (row < num_rows)[:, None], channel < WIDTH
    row = (model * num_rows + row)[:, None]
    packed_address = row * (2 * WIDTH + VALUES) + channel[None, :]
    heads_address = row * (2 * HEADS * WIDTH + VALUES) + channel[None, :]
    return model, row, inside, within, inside & within[None, :], packed_address, heads_address


@triton.jit
def turned_heads_kernel(packed, gain, bias, angle, heads, num_rows, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                        PADDED: tl.constexpr, ANGLES: tl.constexpr, VALUES: tl.constexpr,
                        ROWS: tl.constexpr):  # fmt: skip
    """Grid: blocks of a model's positions, models."""
    model, row, inside, within, there, packed_address, heads_address = _places(
        num_rows, HEADS, WIDTH, PADDED, VALUES, ROWS
    )  # fmt: skip
    channel, pair = tl.arange(0, PADDED), tl.arange(0, PADDED // 2)[None, :]
    gain += model * 2 * WIDTH + channel
    bias += model * 2 * HEADS * WIDTH + channel
    query, _scale = unit_rows(packed, packed_address, there, WIDTH, eps)
    query *= tl.load(gain, mask=within, other=0.0).to(tl.float32)[None, :]
    key, _scale = unit_rows(packed + WIDTH, packed_address, there, WIDTH, eps)
    key *= tl.load(gain + WIDTH, mask=within, other=0.0).to(tl.float32)[None, :]
    for head in range(HEADS):
        # Pairs without an angle are turned by 0.
        given = tl.load(angle + (row * HEADS + head) * ANGLES + pair, mask=inside & (pair < ANGLES), other=0.0)
        cos, sin = tl.cos(given), tl.sin(given)
        shift = tl.load(bias + head * WIDTH, mask=within, other=0.0).to(tl.float32)
        first, second = _pairs(query + shift[None, :], ROWS, PADDED)
        first, second = _turned(first, second, cos, sin)
        tl.store(heads + heads_address + head * WIDTH, _joined(first, second, ROWS, PADDED), mask=there)
        shift = tl.load(bias + (HEADS + head) * WIDTH, mask=within, other=0.0).to(tl.float32)
        first, second = _pairs(key + shift[None, :], ROWS, PADDED)
        first, second = _turned(first, second, cos, sin)
        tl.store(heads + heads_address + (HEADS + head) * WIDTH, _joined(first, second, ROWS, PADDED), mask=there)
    _copy_values(packed, heads, row, inside, 2 * WIDTH, 2 * HEADS * WIDTH, VALUES, PADDED)


@triton.jit
def _turned_back(gradient, shifted, cos, sin, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """A head's gradient of query or key, turned back, and what it says of the angles."""
    first, second = _pairs(shifted, ROWS, PADDED)
    first, second = _turned(first, second, cos, sin)
    of_first, of_second = _pairs(gradient, ROWS, PADDED)
    back_first, back_second = _turned(of_first, of_second, cos, -sin)
    return _joined(back_first, back_second, ROWS, PADDED), first * of_second - second * of_first


@triton.jit
def turned_heads_gradient_kernel(gradient, packed, gain, bias, angle, of_packed, of_gain, of_bias, of_angle, num_rows,
                                 eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                                 ANGLES: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Grid: blocks of a model's positions, models."""
    model, row, inside, within, there, packed_address, heads_address = _places(
        num_rows, HEADS, WIDTH, PADDED, VALUES, ROWS
    )  # fmt: skip
    channel, pair = tl.arange(0, PADDED), tl.arange(0, PADDED // 2)[None, :]
    gain += model * 2 * WIDTH + channel
    bias += model * 2 * HEADS * WIDTH + channel
    block = model * tl.num_programs(0) + tl.program_id(0)
    of_gain += block * 2 * WIDTH + channel
    of_bias += block * 2 * HEADS * WIDTH + channel
    query_gain = tl.load(gain, mask=within, other=0.0).to(tl.float32)[None, :]
    key_gain = tl.load(gain + WIDTH, mask=within, other=0.0).to(tl.float32)[None, :]
    query, query_scale = unit_rows(packed, packed_address, there, WIDTH, eps)
    key, key_scale = unit_rows(packed + WIDTH, packed_address, there, WIDTH, eps)
    of_query, of_key = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    for head in range(HEADS):
        address, has_angle = (row * HEADS + head) * ANGLES + pair, inside & (pair < ANGLES)
        given = tl.load(angle + address, mask=has_angle, other=0.0)
        cos, sin = tl.cos(given), tl.sin(given)
        shift = tl.load(bias + head * WIDTH, mask=within, other=0.0).to(tl.float32)[None, :]
        given = tl.load(gradient + heads_address + head * WIDTH, mask=there, other=0.0).to(tl.float32)
        back, of_turn = _turned_back(given, query * query_gain + shift, cos, sin, ROWS, PADDED)
        tl.store(of_bias + head * WIDTH, tl.sum(back, axis=0), mask=within)
        of_query += back
        shift = tl.load(bias + (HEADS + head) * WIDTH, mask=within, other=0.0).to(tl.float32)[None, :]
        given = tl.load(gradient + heads_address + (HEADS + head) * WIDTH, mask=there, other=0.0).to(tl.float32)
        back, of_key_turn = _turned_back(given, key * key_gain + shift, cos, sin, ROWS, PADDED)
        tl.store(of_bias + (HEADS + head) * WIDTH, tl.sum(back, axis=0), mask=within)
        of_key += back
        tl.store(of_angle + address, of_turn + of_key_turn, mask=has_angle)
    tl.store(of_gain, tl.sum(of_query * query, axis=0), mask=within)
    tl.store(of_gain + WIDTH, tl.sum(of_key * key, axis=0), mask=within)
    of_query *= query_gain
    of_key *= key_gain
    of_query = query_scale * (of_query - query * (tl.sum(of_query * query, axis=1, keep_dims=True) / WIDTH))
    of_key = key_scale * (of_key - key * (tl.sum(of_key * key, axis=1, keep_dims=True) / WIDTH))
    tl.store(of_packed + packed_address, of_query, mask=there)
    tl.store(of_packed + WIDTH + packed_address, of_key, mask=there)
    _copy_values(gradient, of_packed, row, inside, 2 * HEADS * WIDTH, 2 * WIDTH, VALUES, PADDED)
