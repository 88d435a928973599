"""FlashAttention in Triton: softmax attention whose weights stay on the chip (Dao et al., 2022; Dao, 2023).

    y_t = sum_s p_ts v_s,   p_ts = exp(c q_t . k_s - z_t),   z_t = log sum_s exp(c q_t . k_s),   c = 1 / sqrt(K)

over the keys s that t sees. The forward pass goes over the keys a block at a time and keeps the largest score so far
and the sum of exponentials under it; z is all it leaves for the backward pass, which makes each block of p once more.
With g_t = dL/dy_t:

    r_t = g_t . y_t,   d_ts = p_ts (g_t . v_s - r_t)
    dL/dv_s = sum_t p_ts g_t,   dL/dq_t = c sum_s d_ts k_s,   dL/dk_s = c sum_t d_ts q_t

A first kernel sums over s and writes r, a second sums over t; neither adds to what another program wrote, so that equal
inputs give equal bits. Scores, statistics and sums are float32; what enters a product has the inputs' dtype.

A program has a block of queries and walks the keys that they see, or the other way round. Where there are too few of
them to fill the device, as with one head, that walk is all the time there is, and it is split: each part i of the keys
gives y_i and z_i of its own, and

    y_t = sum_i exp(z_it - z_t) y_it,   z_t = log sum_i exp(z_it)

Gradients are sums already: those of the parts are added up. Parts are float32, and added in one order.

Forget gates add C_t - C_s to the score of t and s, with C_t = log f_1 + ... + log f_t (Lin et al., 2025). Then

    dL/dC_u = sum_(s < u) d_us - sum_(t > u) d_tu

The first sum is that of the first kernel, the second that of the second. d_uu, which may be the largest by far and
would be lost again only up to rounding, is left out of both. C is float64: it grows with the length, and differences
of it decide.

Two operators. `flash_attention` takes query, key and value as any views whose channels lie side by side.
`packed_flash_attention` takes what one projection made, [query | key | value], rotates it on the way in, and gives back
one gradient of the same form: no pass over the memory is spent on rotating, splitting or joining.
"""

from typing import Any

import torch
from torch import Tensor

from attnbench.ops.attention.triton.flash_launch import backward, channels_side_by_side, forward
from attnbench.ops.common.triton.batching import join_the_batch
from attnbench.ops.common.triton.launching import register_fake
from attnbench.ops.layers.triton.rotary_kernels import by_heads

MAX_WIDTH = 128
"""Channels a head. A width that is no power of two is computed as the next one, the rest masked."""


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> None:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"query has {query.dtype}: float32, bfloat16 and float16 are what this kernel has")
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        raise TypeError("Triton's interpreter computes no products in bfloat16; float32 and float16 work there")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if query.shape[3] > MAX_WIDTH:
        raise ValueError(f"{query.shape[3]} channels a head: {MAX_WIDTH} are the most")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or query.shape[2] % key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if causal and query.shape[1] > key.shape[1]:
        raise ValueError(f"{query.shape[1]} queries, {key.shape[1]} keys: the first queries would see no key")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window of {window}, causal={causal}: must be at least 1, and needs causal attention")


def _check_cumulative(query: Tensor, key: Tensor, cumulative: Tensor, causal: bool) -> None:
    expected = (query.shape[0], query.shape[2], key.shape[1])
    if cumulative.shape != expected or cumulative.dtype != torch.float64:
        raise ValueError(f"cumulative is {cumulative.dtype} {tuple(cumulative.shape)}, must be float64 {expected}")
    if not causal:
        raise ValueError("forget gates need causal attention")


@torch.library.custom_op("attnbench::flash_attention", mutates_args=())
def _flash_attention(
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    cumulative_BHS: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`flash_attention`, and z as (B, H, T)."""
    _check(query_BTHK, key_BSGK, value_BSGK, causal, window)
    if cumulative_BHS is not None:
        _check_cumulative(query_BTHK, key_BSGK, cumulative_BHS, causal)
        cumulative_BHS = cumulative_BHS.contiguous()
    inputs = _side_by_side(query_BTHK, key_BSGK, value_BSGK)
    return forward(inputs, None, cumulative_BHS, causal, window)


def _side_by_side(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return channels_side_by_side(query), channels_side_by_side(key), channels_side_by_side(value)


@register_fake(_flash_attention)
def _(query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H = query_BTHK.shape[:3]
    return query_BTHK.new_empty(query_BTHK.shape), query_BTHK.new_empty((B, H, T), dtype=torch.float32)


@torch.library.custom_op("attnbench::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    gradient_BTHK: Tensor,
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    cumulative_BHS: Tensor | None,
    mixed_BTHK: Tensor,
    logsumexp_BHT: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and C, each contiguous; the last is empty where there are no gates."""
    query, key, value = inputs = _side_by_side(query_BTHK, key_BSGK, value_BSGK)
    gradients = (query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape))
    cumulative = None if cumulative_BHS is None else cumulative_BHS.contiguous()
    cumulative_gradient = None if cumulative is None else torch.empty_like(cumulative)
    gates = (cumulative, cumulative_gradient)
    backward(gradients, gradient_BTHK, inputs, None, *gates, mixed_BTHK, logsumexp_BHT, causal, window)
    return *gradients, query.new_empty(0) if cumulative_gradient is None else cumulative_gradient


@register_fake(_flash_attention_backward)
def _(
    gradient_BTHK: Tensor,
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    cumulative_BHS: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, cumulative = query_BTHK, key_BSGK, value_BSGK, cumulative_BHS
    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    return *gradients, query.new_empty(0) if cumulative is None else cumulative.new_empty(cumulative.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    # Else zeros would be filled in for the gradient of z, that nothing reads.
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    has_gates = ctx.saved_tensors[3] is not None
    *gradients, of_cumulative = _flash_attention_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.window)
    return *gradients, of_cumulative if has_gates else None, None, None


_flash_attention.register_autograd(_gradient, setup_context=_save)


join_the_batch(_flash_attention)


def flash_attention(
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    cumulative_BHS: Tensor | None = None,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention of H query heads over G key/value heads, each shared by H / G; (B, T, H, K).

    Args:
        cumulative_BHS: C, float64: log f of each query head, summed up to each key's position, that of the key
            included, as cumulative.py makes it; only differences of it count. None: no
            gates. They need `causal`.
        causal: a query sees the keys up to its own position, the last query standing at the last key.
        window: of those, the last so many, its own position included; None for all.
    """
    return _flash_attention(query_BTHK, key_BSGK, value_BSGK, cumulative_BHS, causal, window)[0]


@torch.library.custom_op("attnbench::packed_flash_attention", mutates_args=())
def _packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`packed_flash_attention`, and z as (B, H, T)."""
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


@register_fake(_packed_flash_attention)
def _(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    B, T, C = packed_BTC.shape
    width = C // (num_heads + 2 * num_key_value_heads)
    return packed_BTC.new_empty((B, T, num_heads * width)), packed_BTC.new_empty((B, num_heads, T), dtype=torch.float32)


@torch.library.custom_op("attnbench::packed_flash_attention_backward", mutates_args=())
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
    """The gradient of packed_BTC, contiguous."""
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


@register_fake(_packed_flash_attention_backward)
def _(gradient_BTC: Tensor, packed_BTC: Tensor, *_: Any) -> Tensor:
    return packed_BTC.new_empty(packed_BTC.shape)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, rotation, *ctx.settings = inputs
    ctx.save_for_backward(packed, rotation, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _packed_gradient(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    return (_packed_flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings), *(None,) * 5)


_packed_flash_attention.register_autograd(_packed_gradient, setup_context=_save_packed)


join_the_batch(_packed_flash_attention, shared={1})


def packed_flash_attention(
    packed_BTC: Tensor,
    rotation_2TK: Tensor | None,
    *,
    num_heads: int,
    num_key_value_heads: int,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attend from one tensor that holds query, key and value side by side; heads side by side too, (B, T, H K).

    Args:
        packed_BTC: [query | key | value] with H, G and G heads of K channels each.
        rotation_2TK: cos and sin, (2, T, K / 2) in float32, by which channel pairs (2i, 2i + 1) of query and key are
            turned before they meet; None for no rotation. It has no gradient.
        causal, window: as in `flash_attention`.
    """
    return _packed_flash_attention(packed_BTC, rotation_2TK, num_heads, num_key_value_heads, causal, window)[0]
