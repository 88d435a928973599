"""Query and key of every head from a shared query and key, as in Mamba-3, in one pass over the memory each way:
normalised, shifted by a bias per head, and rotated by an angle per position, head and channel pair.

    s_h = gain x / sqrt(mean(x²) + eps) + bias_h,   channels (2a, 2a + 1) of y_h: those of s_h, turned by angle_h,a
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch
from attnbench.ops.layers.triton.rms_norm import unit_rows
from attnbench.ops.layers.triton.rotary_kernels import padded_width

ROWS = 16
"""Positions per program."""


def _heads(packed_BTC: Tensor, gain: Tensor, bias_R2HK: Tensor, *_: Any) -> Tensor:
    num_heads, width = bias_R2HK.shape[2:]
    return packed_BTC.new_empty(*packed_BTC.shape[:2], packed_BTC.shape[2] + 2 * (num_heads - 1) * width)


def _gradients(gradient: Tensor, packed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return packed.new_empty(packed.shape), *(x.new_empty(x.shape, dtype=torch.float32) for x in inputs[:3])


@custom_op("turned_heads", _heads)
def turned_heads(packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float) -> Tensor:
    """Return packed query and key of every head, and value, for `scalar_decay`: (B, T, HK + HK + HV), in the input's
    dtype, computed in float32.

    Args:
        packed_BTC: one query, one key, and the values of all heads, (B, T, K + K + HV).
        gain_R2K, bias_R2HK: of query and key, for R stacked models; equal parts of the batch belong to each, in order.
        angle_BTHA: float32, of the first A of K / 2 channel pairs.
    """
    packed_BTC = packed_BTC.contiguous()
    heads_BTC = _heads(packed_BTC, gain_R2K, bias_R2HK)
    inputs = packed_BTC, gain_R2K.contiguous(), bias_R2HK.contiguous(), angle_BTHA.contiguous()
    num_rows, grid, options = _launch(packed_BTC, bias_R2HK, angle_BTHA)
    with torch.cuda.device_of(packed_BTC):
        launch(turned_heads_kernel, grid, *inputs, heads_BTC, num_rows, eps, **options)
    return heads_BTC


@custom_op("turned_heads_backward", _gradients)
def turned_heads_backward(
    gradient_BTC: Tensor, packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the packed tensor, in its dtype, and of gain, bias and angle in float32.

    With g_h the gradient of y_h rotated back, n the normalised x before the gain, and r its factor:

        dL/dbias_h = sum over positions of g_h,   G = sum over heads of g_h,   dL/dgain = sum over positions of G n
        dL/dx = r (G gain - n mean(G gain n)),   dL/dangle = s_0 g_1 - s_1 g_0 of a pair of s_h, of query and key
    """
    packed_BTC = packed_BTC.contiguous()
    num_rows, grid, options = _launch(packed_BTC, bias_R2HK, angle_BTHA)
    of_packed, of_angle = torch.empty_like(packed_BTC), torch.empty_like(angle_BTHA, dtype=torch.float32)
    # One sum per part of the positions, added in order: deterministic.
    num_parts, num_models = grid
    of_gain, of_bias = (
        x.new_empty(num_models, num_parts, *x.shape[1:], dtype=torch.float32) for x in (gain_R2K, bias_R2HK)
    )
    inputs = (x.contiguous() for x in (gradient_BTC, packed_BTC, gain_R2K, bias_R2HK, angle_BTHA))
    results = of_packed, of_gain, of_bias, of_angle
    with torch.cuda.device_of(packed_BTC):
        launch(turned_heads_gradient_kernel, grid, *inputs, *results, num_rows, eps, **options)
    return of_packed, of_gain.sum(1), of_bias.sum(1), of_angle


def _launch(packed_BTC: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor) -> tuple[int, tuple[int, int], dict[str, Any]]:
    num_models, _, num_heads, width = bias_R2HK.shape
    num_rows = packed_BTC.shape[0] * packed_BTC.shape[1] // num_models
    padded_heads, padded = triton.next_power_of_2(num_heads), padded_width(width)
    sizes = {"HEADS": num_heads, "PADDED_HEADS": padded_heads, "WIDTH": width, "PADDED": padded}
    sizes |= {"ANGLES": angle_BTHA.shape[3], "VALUES": packed_BTC.shape[2] - 2 * width, "ROWS": ROWS}
    # Sixteen numbers of all heads' queries per thread.
    num_warps = min(16, max(1, padded_heads * padded // 512))
    return num_rows, (-(-num_rows // ROWS), num_models), sizes | {"num_warps": num_warps}


@gradient_of(turned_heads)
def _gradient(ctx: Any, gradient_BTC: Tensor) -> tuple[Tensor, ...]:
    return turned_heads_backward(gradient_BTC, *ctx.saved_tensors, *ctx.settings)


@triton.jit
def _pairs(x, HEADS: tl.constexpr, PADDED: tl.constexpr):
    return tl.split(tl.reshape(x, [HEADS, PADDED // 2, 2]))


@triton.jit
def _joined(first, second, HEADS: tl.constexpr, PADDED: tl.constexpr):
    return tl.reshape(tl.join(first, second), [HEADS, PADDED])


@triton.jit
def cos_sin(angle):
    """Return cosine and sine, to 1e-7 for angles below 8,192 and beyond as exact as the angle, by one reduction to an
    eighth of a turn and two series. tl.cos and tl.sin reduce once each."""
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    # Half of pi in three numbers, so that products with the first two are exact.
    x = angle - quarters * 1.5703125 - quarters * 4.837512969970703e-4 - quarters * 7.549789948768648e-8
    square = x * x
    sine = x + x * square * (-0.16666654611 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cosine = 1.0 - 0.5 * square
    cosine += (
        square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    quarter = quarters.to(tl.int32)
    is_odd = (quarter & 1) != 0
    cos, sin = tl.where(is_odd, sine, cosine), tl.where(is_odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def _turned(x, cos, sin, HEADS: tl.constexpr, PADDED: tl.constexpr):
    first, second = _pairs(x, HEADS, PADDED)
    return _joined(first * cos - second * sin, second * cos + first * sin, HEADS, PADDED)


@triton.jit
def _copy_values(source, target, first_row, end_row, source_keys, target_keys, VALUES: tl.constexpr,
                 PADDED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    row = first_row + tl.arange(0, ROWS)[:, None]
    source += row * (source_keys + VALUES) + source_keys
    target += row * (target_keys + VALUES) + target_keys
    for first in range(0, VALUES, PADDED):
        channel = first + tl.arange(0, PADDED)[None, :]
        there = (row < end_row) & (channel < VALUES)
        tl.store(target + channel, tl.load(source + channel, mask=there), mask=there)


@triton.jit
def _places(num_rows, gain, bias, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr,
            PADDED: tl.constexpr, ANGLES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    head, channel = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    pair, is_head = tl.arange(0, PADDED // 2)[None, :], head < HEADS
    shared, by_head, there = channel + head * 0, head * WIDTH + channel, is_head & (channel < WIDTH)
    gain += model * 2 * WIDTH + shared
    query_gain = tl.load(gain, mask=there, other=0.0).to(tl.float32)
    key_gain = tl.load(gain + WIDTH, mask=there, other=0.0).to(tl.float32)
    first_row, end_row = model * num_rows + tl.program_id(0) * ROWS, (model + 1) * num_rows
    angles, has_angle = head * ANGLES + pair, is_head & (pair < ANGLES)
    bias += model * 2 * HEADS * WIDTH + by_head
    return first_row, end_row, shared, there, by_head, angles, has_angle, query_gain, key_gain, bias


@triton.jit
def turned_heads_kernel(packed, gain, bias, angle, heads, num_rows, eps, HEADS: tl.constexpr,
                        PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ANGLES: tl.constexpr,
                        VALUES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Walk the positions one by one, all heads at once. Grids are parts of a model's positions, and models."""
    first_row, end_row, shared, there, by_head, angles, has_angle, query_gain, key_gain, bias = _places(
        num_rows, gain, bias, HEADS, PADDED_HEADS, WIDTH, PADDED, ANGLES, ROWS
    )  # fmt: skip
    query_shift = tl.load(bias, mask=there, other=0.0).to(tl.float32)
    key_shift = tl.load(bias + HEADS * WIDTH, mask=there, other=0.0).to(tl.float32)
    _copy_values(packed, heads, first_row, end_row, 2 * WIDTH, 2 * HEADS * WIDTH, VALUES, PADDED, ROWS)
    for row in range(first_row, tl.minimum(first_row + ROWS, end_row)):
        # Pairs without an angle are rotated by 0.
        cos, sin = cos_sin(tl.load(angle + row * HEADS * ANGLES + angles, mask=has_angle, other=0.0))
        source, target = row * (2 * WIDTH + VALUES) + shared, heads + row * (2 * HEADS * WIDTH + VALUES) + by_head
        query, _scale = unit_rows(packed, source, there, WIDTH, eps)
        query = _turned(query * query_gain + query_shift, cos, sin, PADDED_HEADS, PADDED)
        tl.store(target, query, mask=there)
        key, _scale = unit_rows(packed + WIDTH, source, there, WIDTH, eps)
        key = _turned(key * key_gain + key_shift, cos, sin, PADDED_HEADS, PADDED)
        tl.store(target + HEADS * WIDTH, key, mask=there)


@triton.jit
def _of_angle(shifted, back, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """Return the gradient of the angles, from pairs before rotation and their gradients rotated back."""
    first, second = _pairs(shifted, HEADS, PADDED)
    of_first, of_second = _pairs(back, HEADS, PADDED)
    return first * of_second - second * of_first


@triton.jit
def _through_the_norm(of_normed, unit, scale, gain, WIDTH: tl.constexpr):
    of_unit = of_normed * gain
    return scale * (of_unit - unit * (tl.sum(of_unit * unit, axis=1, keep_dims=True) / WIDTH))


@triton.jit
def turned_heads_gradient_kernel(gradient, packed, gain, bias, angle, of_packed, of_gain, of_bias, of_angle, num_rows,
                                 eps, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr,
                                 PADDED: tl.constexpr, ANGLES: tl.constexpr, VALUES: tl.constexpr,
                                 ROWS: tl.constexpr):  # fmt: skip
    """Sums over positions stay in registers."""
    first_row, end_row, shared, there, by_head, angles, has_angle, query_gain, key_gain, bias = _places(
        num_rows, gain, bias, HEADS, PADDED_HEADS, WIDTH, PADDED, ANGLES, ROWS
    )  # fmt: skip
    # Shared channels have equal rows for all heads; the first is written.
    is_first = there & (by_head < WIDTH)
    of_query_bias = tl.zeros([PADDED_HEADS, PADDED], tl.float32)
    of_key_bias = tl.zeros([PADDED_HEADS, PADDED], tl.float32)
    of_query_gain = tl.zeros([PADDED_HEADS, PADDED], tl.float32)
    of_key_gain = tl.zeros([PADDED_HEADS, PADDED], tl.float32)
    _copy_values(gradient, of_packed, first_row, end_row, 2 * HEADS * WIDTH, 2 * WIDTH, VALUES, PADDED, ROWS)
    for row in range(first_row, tl.minimum(first_row + ROWS, end_row)):
        cos, sin = cos_sin(tl.load(angle + row * HEADS * ANGLES + angles, mask=has_angle, other=0.0))
        place, at = row * (2 * WIDTH + VALUES) + shared, gradient + row * (2 * HEADS * WIDTH + VALUES) + by_head
        query, query_scale = unit_rows(packed, place, there, WIDTH, eps)
        back = tl.load(at, mask=there, other=0.0).to(tl.float32)
        back = _turned(back, cos, -sin, PADDED_HEADS, PADDED)
        # Loaded again at every position: registers for shifts would leave room for four programs instead of six.
        query_shift = tl.load(bias, mask=there, other=0.0).to(tl.float32)
        of_turn = _of_angle(query * query_gain + query_shift, back, PADDED_HEADS, PADDED)
        of_query_bias += back
        of_query_gain += back * query
        of_query = tl.sum(back, axis=0, keep_dims=True)
        key, key_scale = unit_rows(packed + WIDTH, place, there, WIDTH, eps)
        back = tl.load(at + HEADS * WIDTH, mask=there, other=0.0).to(tl.float32)
        back = _turned(back, cos, -sin, PADDED_HEADS, PADDED)
        key_shift = tl.load(bias + HEADS * WIDTH, mask=there, other=0.0).to(tl.float32)
        of_turn += _of_angle(key * key_gain + key_shift, back, PADDED_HEADS, PADDED)
        of_key_bias += back
        of_key_gain += back * key
        of_key = tl.sum(back, axis=0, keep_dims=True)
        tl.store(of_angle + row * HEADS * ANGLES + angles, of_turn, mask=has_angle)
        of_query = _through_the_norm(of_query, query, query_scale, query_gain, WIDTH)
        of_key = _through_the_norm(of_key, key, key_scale, key_gain, WIDTH)
        tl.store(of_packed + place, of_query, mask=is_first)
        tl.store(of_packed + place + WIDTH, of_key, mask=is_first)
    block = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    of_bias += block * 2 * HEADS * WIDTH + by_head
    tl.store(of_bias, of_query_bias, mask=there)
    tl.store(of_bias + HEADS * WIDTH, of_key_bias, mask=there)
    of_gain += block * 2 * WIDTH + shared
    tl.store(of_gain, tl.sum(of_query_gain, axis=0, keep_dims=True), mask=is_first)
    tl.store(of_gain + WIDTH, tl.sum(of_key_gain, axis=0, keep_dims=True), mask=is_first)
