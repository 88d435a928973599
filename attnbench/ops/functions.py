"""Public functions of the operators on plain tensors, exported by `attnbench.ops`.

Axes: B sequences, T positions, H heads, G heads of query and key (each shared by H / G heads of the value), K and V
channels per head of query and key and of the value. Every function is causal, differentiable, and computes in the dtype
of its inputs: float32, bfloat16, or float64 on a CPU. States, decays and gates are float32 at least.

`backend` is "torch", "triton" (our kernels, CUDA only), "fla" (flash-linear-attention) or "auto": triton on CUDA for
head sizes that the kernels support, otherwise torch; see docs/backends.md. A backend that cannot run here raises a
UserError that names the remedy.

A recurrent function takes the state before the first position as `memory` and returns the last state, or None if
`memory` is None, which means zeros. A single position with a state is a decoding step: triton has no gradient for it
and may update the given state in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.machine.device import on_kernels
from attnbench.ops.attention.forgetting_attention import forgetting_attention
from attnbench.ops.attention.softmax_attention import choose_fused, fused, materialised
from attnbench.ops.attention.window_attention import choose_beside_torch, window_attention
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.common.recurrence import Recurrence
from attnbench.ops.delta import delta_rule
from attnbench.ops.diagonal import diagonal_decay as diagonal
from attnbench.ops.layers import rotary as rotation
from attnbench.ops.linear import linear_attention as linear
from attnbench.ops.scalar import mlstm as exponential
from attnbench.ops.scalar import scalar_decay as scalar


def softmax_attention(
    query_BTHK: Tensor,
    key_BTGK: Tensor,
    value_BTGK: Tensor,
    *,
    window: int | None = None,
    log_forget_BTH: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal softmax attention (Vaswani et al., 2017) with grouped heads, a sliding window or forget gates.

        y_t = sum_(s <= t) a_ts v_s,   a_ts = softmax over s of (q_t . k_s / sqrt(K) + log f_(s+1) + ... + log f_t)

    Args:
        key_BTGK, value_BTGK: G divides H; each head serves H / G query heads (Ainslie et al., 2023).
        window: number of positions visible to a query, including its own; None for all.
        log_forget_BTH: log f_t <= 0 of each query head (Lin et al., 2025); None for none. Not with a window.
        backend: also "sdpa", "cudnn" and "flash_attn", without gates. On a CPU auto is sdpa, or torch with a window.

    Returns:
        y (B, T, H, K).

    Raises:
        ValueError: both a window and forget gates.
    """
    if log_forget_BTH is not None and window is not None:
        raise ValueError("window and log_forget_BTH: softmax_attention takes one of them")
    inputs, is_plain = (query_BTHK, key_BTGK, value_BTGK), log_forget_BTH is None and window is None
    if not is_plain or backend != "torch":
        backend = (choose_fused if is_plain else choose_beside_torch)(
            backend,
            window=window,
            head_width=query_BTHK.shape[3],
            device_type=query_BTHK.device.type,
            precision=_precision(query_BTHK),
        )
    if log_forget_BTH is not None:
        return forgetting_attention(*inputs, at_least_float32(log_forget_BTH), backend)
    if window is not None:
        return window_attention(*inputs, window, backend)
    return materialised(*inputs, None) if backend == "torch" else fused(*inputs, None, backend)


def linear_attention(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    *,
    feature_map: str = "elu",
    memory: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Linear attention with normaliser (Katharopoulos et al., 2020).

        S_t = S_{t-1} + f(k_t) v_t^T,   z_t = z_{t-1} + f(k_t),   y_t = S_t^T f(q_t) / (f(q_t) . z_t + 1e-6)

    Args:
        feature_map: f, "elu" (elu(x) + 1), "relu" or "softmax" over the channels.
        memory: S (B, H, K, K) and z (B, H, K).

    Returns:
        y (B, T, H, K), and the last S and z.
    """
    heads, width = query_BTHK.shape[2:]
    backend = _resolve(linear.LINEAR_ATTENTION, backend, query_BTHK, width)
    start = (None, None) if memory is None else memory
    if backend == "triton":
        is_applied = feature_map == "softmax"
        pair = (linear.feature(x, feature_map) if is_applied else x for x in (query_BTHK, key_BTHK))
        packed_BTC = torch.cat([x.flatten(2) for x in (*pair, value_BTHK)], dim=-1)
        name = "identity" if is_applied else feature_map
        y_BTHK, *last = linear.packed_linear_attention(packed_BTC, *start, None, heads, name)
    else:
        query, key = (linear.feature(x, feature_map) for x in (query_BTHK, key_BTHK))
        y_BTHK, *last = linear.linear_attention(query, key, value_BTHK, *start, None, backend)
    return y_BTHK, None if memory is None else (last[0], last[1])


def gated_delta_rule(
    query_BTGK: Tensor,
    key_BTGK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    memory: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule with one decay per head (Yang, Kautz and Hatamizadeh, 2025); with a log decay of 0, DeltaNet's
    rule.

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    Args:
        query_BTGK, key_BTGK: of unit length (`torch.nn.functional.normalize`), so that the state stays bounded.
        log_decay_BTH: log a_t <= 0.
        beta_BTH: b_t, from 0 to 1, or to 2 for negative eigenvalues.
        memory: M (B, H, K, V).

    Returns:
        y (B, T, H, V), and the last M.
    """
    (groups, width), (heads, value_width) = query_BTGK.shape[2:], value_BTHV.shape[2:]
    log_decay, beta = at_least_float32(log_decay_BTH), at_least_float32(beta_BTH)
    backend = _resolve(delta_rule.DELTA_RULE, backend, query_BTGK, value_width)
    if backend == "triton":
        packed_BTC = torch.cat([x.flatten(2) for x in (query_BTGK, key_BTGK, value_BTHV)], dim=-1)
        y_BTHV, last = delta_rule.packed_gated_delta_rule(packed_BTC, log_decay, beta, memory, width, False, groups)
        return y_BTHV, memory if last is None else last
    query, key = (x.repeat_interleave(heads // groups, 2) for x in (query_BTGK * width**-0.5, key_BTGK))
    y_BTHV, last = delta_rule.gated_delta_rule(query, key, value_BTHV, log_decay, beta, memory, backend)
    return y_BTHV, None if memory is None else last


def scalar_decay(
    query_BTGK: Tensor,
    key_BTGK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    *,
    memory: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay per head, as in RetNet (Sun et al., 2023) and Mamba-2 (Dao and Gu, 2024).

        S_t = a_t S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)

    Args:
        log_decay_BTH: log a_t <= 0; (1, T, H) if all sequences share it.
        memory: S (B, H, K, V).

    Returns:
        y (B, T, H, V), and the last S.
    """
    backend = _resolve(scalar.SCALAR_DECAY, backend, query_BTGK, value_BTHV.shape[3])
    query, log_decay = query_BTGK * query_BTGK.shape[3] ** -0.5, at_least_float32(log_decay_BTH)
    y_BTHV, last = scalar.scalar_decay(query, key_BTGK, value_BTHV, log_decay, memory, backend)
    return y_BTHV, None if memory is None else last


def diagonal_decay(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    beta_BTH: Tensor | None = None,
    *,
    memory: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention (GLA; Yang et al., 2024) or, with beta, delta rule (KDA; Kimi Team, 2025), with one decay per
    key channel.

        S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)

    Args:
        key_BTHK: of unit length if `beta_BTH` is given.
        log_decay_BTHK: log a_t <= 0.
        beta_BTH: b_t; None: nothing is erased and S_t = Diag(a_t) S_{t-1} + k_t v_t^T.
        memory: S (B, H, K, V).

    Returns:
        y (B, T, H, V), and the last S.
    """
    backend = _resolve(diagonal.DIAGONAL_DECAY, backend, query_BTHK, value_BTHV.shape[3])
    strength = None if beta_BTH is None else at_least_float32(beta_BTH)[..., None]
    query, log_decay = query_BTHK * query_BTHK.shape[3] ** -0.5, at_least_float32(log_decay_BTHK)
    inputs = diagonal.DiagonalInputs(query, key_BTHK, value_BTHV, log_decay, strength, strength)
    y_BTHV, last = diagonal.diagonal_decay(inputs, memory, backend)
    return y_BTHV, None if memory is None else memory if last is None else last


def mlstm(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_forget_BTH: Tensor,
    log_write_BTH: Tensor,
    *,
    memory: exponential.Memory | None = None,
    backend: str = "auto",
) -> tuple[Tensor, exponential.Memory | None]:
    """Stabilised mLSTM memory with exponential write gate and normaliser (Beck et al., 2024).

        S_t = f_t S_{t-1} + i_t k_t v_t^T,   n_t = f_t n_{t-1} + i_t k_t,   q'_t = q_t / sqrt(K)
        y_t = S_t^T q'_t / max(|n_t . q'_t|, 1)

    Args:
        log_forget_BTH, log_write_BTH: log f_t <= 0, and log i_t.
        memory: the state that an earlier call returned.

    Returns:
        y (B, T, H, V) in float32 at least, and the last state (with torch also if none was given).
    """
    width, gates = query_BTHK.shape[3], (at_least_float32(log_forget_BTH), at_least_float32(log_write_BTH))
    # Our kernels see one column more for the normaliser, padded to a multiple of 16.
    backend = _resolve(exponential.MLSTM_RECURRENCE, backend, query_BTHK, 16)
    return exponential.mlstm(query_BTHK * width**-0.5, key_BTHK, value_BTHV, *gates, memory, backend)


def short_convolution(
    x_BTC: Tensor, weight_CW: Tensor, history_BWC: Tensor | None = None, *, silu: bool = False
) -> Tensor:
    """Depthwise causal convolution, y_t = sum_i w_i x_(t - W + 1 + i), optionally followed by SiLU.

    Args:
        history_BWC: the W - 1 inputs before the first position, without gradient; None for zeros.

    Returns:
        y (B, T, C).
    """
    channels, size = weight_CW.shape
    if on_kernels(x_BTC) and 2 <= size <= 8:
        from attnbench.ops.layers.triton.short_convolution import short_convolution as convolve

        return convolve(x_BTC, weight_CW, history_BWC, silu)
    past_BWC = x_BTC.new_zeros(len(x_BTC), size - 1, channels) if history_BWC is None else history_BWC.detach()
    padded_BCT = torch.cat([past_BWC.to(x_BTC.dtype), x_BTC], dim=1).mT
    y_BTC = F.conv1d(padded_BCT, weight_CW[:, None].to(x_BTC.dtype), groups=channels).mT
    return F.silu(y_BTC) if silu else y_BTC


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """weight × x / sqrt(mean(x²) + eps) over the last axis (Zhang and Sennrich, 2019); keeps shape and dtype."""
    if on_kernels(x) and not torch.compiler.is_compiling():
        from attnbench.ops.layers.triton.rms_norm import rms_norm as norm

        return norm(x.reshape(-1, x.shape[-1]), weight_D[None], eps).view(x.shape)
    return F.rms_norm(x, weight_D.shape, weight_D.to(x.dtype), eps)


def swiglu(packed: Tensor) -> Tensor:
    """silu(first half) × second half of the last axis, (..., 2 F) to (..., F) (Shazeer, 2020)."""
    if on_kernels(packed):
        from attnbench.ops.layers.triton.swiglu import swiglu as gated

        return gated(packed.flatten(0, -2)).unflatten(0, packed.shape[:-1])
    gate, up = packed.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(x_BTHK: Tensor, *, position: Tensor | int = 0, theta: float = 10_000.0) -> Tensor:
    """Rotary positions (Su et al., 2021): turn channels (2i, 2i + 1) of position t by t × theta^(-2i/K); keeps shape
    and dtype.

    Args:
        position: index of the first of the T positions; a tensor stays on the device.
    """
    _, length, _, width = x_BTHK.shape
    return rotation.rotate(x_BTHK, rotation.rotation(length, width, position, theta, x_BTHK.device))


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, label_weight_N: Tensor | None = None
) -> Tensor:
    """Sum over rows of label_weight × -log softmax(weight x)[target] in nats, a scalar in float32 at least.

    On CUDA only the logits of some rows exist at a time, in x's dtype (as in Liger Kernel, Hsu et al., 2024).

    Args:
        label_weight_N: float32; None for 1.
    """
    if on_kernels(x_ND):
        from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy as loss

        return loss(x_ND, weight_VD, targets_N, label_weight_N, torch.is_grad_enabled())[0]
    nats_N = F.cross_entropy(at_least_float32(x_ND @ weight_VD.to(x_ND.dtype).mT), targets_N, reduction="none")
    return nats_N.sum() if label_weight_N is None else (nats_N * label_weight_N).sum()


def _resolve(recurrence: Recurrence, backend: str, query: Tensor, value_width: int) -> str:
    return recurrence.backends.choose(backend, (query.shape[3], value_width), query.device.type, _precision(query))


def _precision(x: Tensor) -> str:
    return "bfloat16" if x.dtype.itemsize == 2 else "float32"
