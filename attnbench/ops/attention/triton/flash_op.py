"""FlashAttention in Triton: softmax attention without materialised weights (Dao et al., 2022; Dao, 2023).

    y_t = sum_s p_ts v_s,   p_ts = exp(c q_t . k_s - z_t),   z_t = log sum_s exp(c q_t . k_s),   c = 1 / sqrt(K)

over the visible keys s. The forward pass walks the keys in blocks and stores z for the backward pass, which recomputes
p. With g_t = dL/dy_t:

    r_t = g_t . y_t,   d_ts = p_ts (g_t . v_s - r_t)
    dL/dv_s = sum_t p_ts g_t,   dL/dq_t = c sum_s d_ts k_s,   dL/dk_s = c sum_t d_ts q_t

One kernel sums over s and writes r, another sums over t, deterministically. Scores, statistics and sums are float32;
operands of products have the inputs' dtype.

If there are too few blocks to fill the device, walks are split into parts i of the keys:

    y_t = sum_i exp(z_it - z_t) y_it,   z_t = log sum_i exp(z_it)

Forget gates add C_t - C_s to the score of t and s, with C_t = log f_1 + ... + log f_t (Lin et al., 2025). Then

    dL/dC_u = sum_(s < u) d_us - sum_(t > u) d_tu

with one sum from each kernel. d_uu, which may be by far the largest term and cancels, is in neither. C is float64,
because it grows with the length and only differences matter.

`packed_flash_attention` takes a projection's output [query | key | value], rotates it inside, and returns one packed
gradient: no memory pass for rotating, splitting or joining.
"""

from typing import Any

import torch
from torch import Tensor

from attnbench.ops.attention.triton.flash_launch import backward, channels_side_by_side, forward
from attnbench.ops.attention.triton.flash_parts import check_heads
from attnbench.ops.common.triton.custom_ops import contiguous, custom_op, gradient_of
from attnbench.ops.layers.triton.rotary_kernels import by_heads

MAX_WIDTH = 128
"""Channels per head; padded to a power of two."""


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> None:
    check_heads(query, key, value, MAX_WIDTH)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        raise TypeError("Triton's interpreter computes no products in bfloat16; float32 and float16 work there")
    if causal and query.shape[1] > key.shape[1]:
        raise ValueError(f"{query.shape[1]} queries, {key.shape[1]} keys: the first queries would see no key")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window of {window}, causal={causal}: must be at least 1, and needs causal attention")


def _outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H = query.shape[:3]
    return query.new_empty(B, T, H, value.shape[3]), query.new_empty((B, H, T), dtype=torch.float32)


@custom_op("flash_attention", _outputs)
def _flash_attention(
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGV: Tensor,
    cumulative_BHS: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    _check(query_BTHK, key_BSGK, value_BSGV, causal, window)
    if cumulative_BHS is not None:
        expected = (query_BTHK.shape[0], query_BTHK.shape[2], key_BSGK.shape[1])
        if cumulative_BHS.shape != expected or cumulative_BHS.dtype != torch.float64:
            given = f"{cumulative_BHS.dtype} {tuple(cumulative_BHS.shape)}"
            raise ValueError(f"cumulative is {given}, must be float64 {expected}")
        if not causal:
            raise ValueError("forget gates need causal attention")
    inputs = _side_by_side(query_BTHK, key_BSGK, value_BSGV)
    return forward(inputs, None, contiguous(cumulative_BHS), causal, window)


def _side_by_side(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return channels_side_by_side(query), channels_side_by_side(key), channels_side_by_side(value)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates = query.new_empty(0) if cumulative is None else cumulative
    of_query, of_key, of_value, of_cumulative = (x.new_empty(x.shape) for x in (query, key, value, gates))
    return of_query, of_key, of_value, of_cumulative


@custom_op("flash_attention_backward", lambda gradient, *inputs: _gradients(*inputs[:4]))
def _flash_attention_backward(
    gradient_BTHV: Tensor,
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGV: Tensor,
    cumulative_BHS: Tensor | None,
    mixed_BTHV: Tensor,
    logsumexp_BHT: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, cumulative = _side_by_side(query_BTHK, key_BSGK, value_BSGV), contiguous(cumulative_BHS)
    of_query, of_key, of_value, of_cumulative = outputs = _gradients(*inputs, cumulative)
    gates = (cumulative, None if cumulative is None else of_cumulative)
    gradients = (of_query, of_key, of_value)
    backward(gradients, gradient_BTHV, inputs, None, *gates, mixed_BTHV, logsumexp_BHT, causal, window)
    return outputs


@gradient_of(_flash_attention, keeps=slice(None), constant=slice(1, None))
def _gradient(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *gradients, of_cumulative = _flash_attention_backward(gradient, *saved, *ctx.settings)
    return *gradients, None if saved[3] is None else of_cumulative


def flash_attention(
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGV: Tensor,
    cumulative_BHS: Tensor | None = None,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention of H query heads over G key/value heads, each shared by H / G; (B, T, H, V).

    Args:
        value_BSGV: V may differ from K.
        cumulative_BHS: C, float64, see `cumulative_log_forget`; needs `causal`.
        causal: the last query is at the last key.
        window: number of visible positions, its own included; None for all.
    """
    return _flash_attention(query_BTHK, key_BSGK, value_BSGV, cumulative_BHS, causal, window)[0]


def _packed_outputs(packed: Tensor, rotation: Any, num_heads: int, num_groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, C = packed.shape
    width = C // (num_heads + 2 * num_groups)
    return packed.new_empty((B, T, num_heads * width)), packed.new_empty((B, num_heads, T), dtype=torch.float32)


@custom_op("packed_flash_attention", _packed_outputs, shared={1})
def _packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs = by_heads(channels_side_by_side(packed_BTC), num_heads, num_key_value_heads)
    _check(query, key, value, causal, window)
    if rotation_2TK is not None:
        _check_rotation(query, rotation_2TK)
    mixed, logsumexp = forward(inputs, rotation_2TK, None, causal, window)
    return mixed.flatten(2), logsumexp


def _check_rotation(query: Tensor, rotation: Tensor) -> None:
    expected = (2, query.shape[1], query.shape[3] // 2)
    if query.shape[3] % 2 or rotation.shape != expected or rotation.dtype != torch.float32:
        raise ValueError(f"rotation is {rotation.dtype} {tuple(rotation.shape)}, must be float32 {expected}")
    if not rotation.is_contiguous():
        raise ValueError("rotation must be contiguous")


@custom_op("packed_flash_attention_backward", lambda gradient, packed, *_: packed.new_empty(packed.shape), shared={2})
def _packed_flash_attention_backward(
    gradient_BTC: Tensor,
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    mixed_BTC: Tensor,
    logsumexp_BHT: Tensor,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    packed_gradient = packed_BTC.new_empty(packed_BTC.shape)
    backward(
        by_heads(packed_gradient, num_heads, num_key_value_heads),
        gradient_BTC.unflatten(-1, (num_heads, -1)),
        by_heads(channels_side_by_side(packed_BTC), num_heads, num_key_value_heads),
        rotation_2TK,
        *(None, None),
        mixed_BTC,
        logsumexp_BHT,
        causal,
        window,
    )
    return packed_gradient


@gradient_of(_packed_flash_attention, keeps=slice(None), constant=slice(1, None))
def _packed_gradient(ctx: Any, gradient: Tensor, _: None) -> Tensor:
    return _packed_flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings)


def packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    *,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """`flash_attention` on packed query, key and value; packed heads, (B, T, H K).

    Args:
        packed_BTC: [query | key | value] with H, G and G heads of K channels each.
        rotation_2TK: see ops/layers/rotary.py; None for no rotation. No gradient.
    """
    return _packed_flash_attention(packed_BTC, rotation_2TK, num_heads, num_key_value_heads, causal, window)[0]
