"""Gated delta rule (Yang, Kautz and Hatamizadeh, 2025): definition, chunked form, kernels and their choice.

    M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t

The state is M (B, H, K, V). The query comes scaled. With sub-steps (DeltaProduct; Siems et al., 2025) key, value and
beta have S = n T positions, n per position of query and decay. The memory decays before the first of the n and is read
after the last: the rule on n T positions whose other queries and log decays are 0.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.backends import Backends
from attnbench.ops.common.precision import at_least_float32, without_autocast
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.common.scan import chunk_size, chunks_of, positions_of, scan_chunks

KEY_WIDTHS = (16, 32, 64, 128)
"""Key channels per head that our kernels support in every precision."""
WIDE_KEYS = 256
"""Key channels per head that they support in bfloat16 alone."""
LIBRARIES = {"fla": "fla.ops.gated_delta_rule", "flash_qla": "flash_qla"}
"""Module of each library's `chunk_gated_delta_rule`; both have the same arguments."""


def delta_step(
    memory_BHKV: Tensor, query_BHK: Tensor, key_BNHK: Tensor, value_BNHV: Tensor, log_decay_BH: Tensor, beta_BNH: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one position of N sub-steps."""
    memory_BHKV = log_decay_BH.exp()[..., None, None] * memory_BHKV
    for key_BHK, value_BHV, beta_BH in zip(key_BNHK.unbind(1), value_BNHV.unbind(1), beta_BNH.unbind(1), strict=True):
        change_BHV = beta_BH[..., None] * (value_BHV - read(memory_BHKV, key_BHK))
        memory_BHKV = memory_BHKV + outer(key_BHK, change_BHV)
    return memory_BHKV, read(memory_BHKV, query_BHK)


def _sub_steps(
    query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor, log_decay_BTH: Tensor, beta_BSH: Tensor
) -> tuple[Tensor, ...]:
    num_steps = _num_steps(query_BTHK, key_BSHK)
    key, value, beta = (x.unflatten(1, (-1, num_steps)) for x in (key_BSHK, value_BSHV, beta_BSH))
    return query_BTHK, key, value, log_decay_BTH, beta


def gated_delta_rule(
    query_BTHK: Tensor,
    key_BSHK: Tensor,
    value_BSHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BSH: Tensor,
    memory_BHKV: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute y and the last memory with backend `torch` (the definition for a single position), or with a library's
    kernel, `fla` or `flash_qla`."""
    num_steps = _num_steps(query_BTHK, key_BSHK)
    if memory_BHKV is not None and query_BTHK.shape[1] == 1 and backend not in LIBRARIES:
        return DELTA_RULE.define(query_BTHK, key_BSHK, value_BSHV, log_decay_BTH, beta_BSH, memory_BHKV)
    query_BSHK, log_decay_BSH = _by_sub_steps(query_BTHK, log_decay_BTH, num_steps)
    inputs = (query_BSHK, key_BSHK, value_BSHV, log_decay_BSH, beta_BSH)
    if backend in LIBRARIES:
        chunk_gated_delta_rule = import_module(LIBRARIES[backend]).chunk_gated_delta_rule
        options = {"initial_state": memory_BHKV, "output_final_state": memory_BHKV is not None}
        mixed_BSHV, last_memory = chunk_gated_delta_rule(
            *inputs[:3], g=log_decay_BSH, beta=beta_BSH, scale=1.0, **options
        )
    else:
        mixed_BSHV, last_memory = chunked_gated_delta_rule(*inputs, memory_BHKV, chunk_size(query_BTHK.device.type))
    return _after_each_last(mixed_BSHV, num_steps), last_memory


def _num_steps(query_BTHK: Tensor, key_BSHK: Tensor) -> int:
    num_steps, rest = divmod(key_BSHK.shape[1], query_BTHK.shape[1])
    assert num_steps >= 1
    assert rest == 0
    return num_steps


def _by_sub_steps(query_BTHK: Tensor, log_decay_BTH: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Lay out n T positions: the query at each last sub-step, the decay at each first, and zeros elsewhere."""
    if num_steps == 1:
        return query_BTHK, log_decay_BTH
    query_BSHK = F.pad(query_BTHK[:, :, None], (0, 0, 0, 0, num_steps - 1, 0)).flatten(1, 2)
    return query_BSHK, F.pad(log_decay_BTH[:, :, None], (0, 0, 0, num_steps - 1)).flatten(1, 2)


def _after_each_last(mixed_BSHV: Tensor, num_steps: int) -> Tensor:
    return mixed_BSHV[:, num_steps - 1 :: num_steps] if num_steps > 1 else mixed_BSHV


def packed_gated_delta_rule(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BSH: Tensor,
    memory_BHKV: Tensor | None,
    key_width: int,
    has_unit_length: bool,
    num_key_heads: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same by our kernels from packed query, key and value (GK | nGK | nHV), sub-steps side by side.
    `has_unit_length` divides query and key by their length. A single position updates the given memory, and the last
    memory is None."""
    num_heads, num_steps = beta_BSH.shape[-1], beta_BSH.shape[1] // mixed_BTC.shape[1]
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    mixed_BSC = mixed_BTC
    if num_steps > 1:
        keys = num_key_heads * key_width
        query, key, value = mixed_BTC.tensor_split((keys, (1 + num_steps) * keys), -1)
        query_BSGK, log_decay_BTH = _by_sub_steps(query.unflatten(-1, (num_key_heads, -1)), log_decay_BTH, num_steps)
        key_BSC, value_BSC = (part.unflatten(-1, (num_steps, -1)).flatten(1, 2) for part in (key, value))
        mixed_BSC = torch.cat([query_BSGK.flatten(2), key_BSC, value_BSC], dim=-1)
    if memory_BHKV is not None and mixed_BTC.shape[1] == 1:
        from attnbench.ops.delta.triton.delta_step import gated_delta_rule_step

        *_, mixed_BHV = [
            gated_delta_rule_step(mixed_BC, log_decay_BH, beta_BH, memory_BHKV, has_unit_length)
            for mixed_BC, log_decay_BH, beta_BH in zip(
                mixed_BSC.unbind(1), log_decay_BTH.unbind(1), beta_BSH.unbind(1), strict=True
            )
        ]
        return mixed_BHV[:, None], None
    from attnbench.ops.delta.triton import delta_op as kernel

    mixed_BSHV, last_memory = kernel.gated_delta_rule(
        mixed_BSC,
        log_decay_BTH,
        beta_BSH,
        memory_BHKV,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_width=key_width,
        unit_length=has_unit_length,
        keep_memory=memory_BHKV is not None,
    )
    return _after_each_last(mixed_BSHV, num_steps), last_memory


def chunked_gated_delta_rule(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_positions: int,
) -> tuple[Tensor, Tensor]:
    """Compute the same by chunks: products and one triangular solve for all chunks, and a scan over their states.

    Within a chunk, with c_i = g_1 + ... + g_i of log decays, and d_i = b_i (v_i - a_i M_{i-1}^T k_i), the addition of
    position i:

        (I + L) d = b v - b exp(c) k S,            L_ij = b_i exp(c_i - c_j) k_i . k_j  for j < i
        d = U - W S,                               with both right-hand sides through (I + L)^-1
        y_i = exp(c_i) S^T q_i + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) d_j
        S' = exp(c_C) S + sum_j exp(c_C - c_j) k_j d_j^T

    Products run in the dtype of query, key and value, which y keeps; decays, the solve and the states in that of the
    log decay. `num_positions` is the size of a chunk.
    """
    batch, length, heads, _ = query_BTHK.shape
    with without_autocast(query_BTHK.device.type):
        inputs = (query_BTHK, key_BTHK, value_BTHV, log_decay_BTH, beta_BTH)
        # Padding with zeros changes no state.
        query, key, value, log_decay, beta = (chunks_of(x, min(num_positions, length)) for x in inputs)
        cumulative = log_decay.cumsum(-1)
        if memory_BHKV is None:
            memory_BHKV = cumulative.new_zeros(batch, heads, key.shape[-1], value.shape[-1])
        read, write, weight = _within_chunks(query, key, value, cumulative, beta)
        remaining = key * (cumulative[:, -1:] - cumulative).exp().to(key.dtype)[..., None]
        initial_XKV = memory_BHKV.flatten(0, 1)
        state, change, last = scan_chunks(cumulative[:, -1].exp(), read, remaining, write, None, initial_XKV)
        decayed = query * cumulative.exp().to(query.dtype)[..., None]
        mixed = torch.baddbmm(decayed @ state, weight, change)
    return positions_of(mixed, batch, length, heads), last.unflatten(0, (batch, heads))


def _within_chunks(
    query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return -W, U and the weights of y; arguments are (chunks, positions, ...)."""
    size, dtype = key.shape[1], key.dtype
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    # Masked before exp, which would overflow for future positions. In place, to save memory allocation on a CPU.
    decay = (cumulative[:, :, None] + (-cumulative)[:, None, :]).masked_fill_(later, -torch.inf).exp_()
    lower = (key @ key.mT) * decay * beta[..., None]
    identity = torch.eye(size, dtype=decay.dtype, device=key.device).expand_as(lower)
    # The solve only reads below the diagonal.
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True) * beta[:, None, :]
    read = (inverse * -cumulative.exp()[:, None, :]).to(dtype) @ key
    weight = ((query @ key.mT) * decay).to(dtype)
    return read, inverse.to(dtype) @ value, weight


def unit_length(x_BTHK: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale × x / |x| over the last axis, computed in float32 at least; keeps the dtype."""
    wide = at_least_float32(x_BTHK)
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6))).to(x_BTHK.dtype)


def _takes(key_width: int, value_width: float, precision: str) -> bool:
    takes_keys = key_width in KEY_WIDTHS or (key_width == WIDE_KEYS and precision == "bfloat16")
    return takes_keys and value_width > 0 and value_width % 16 == 0


def _packed(mixer: Any, packed_BTC: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor | None) -> Any:
    return packed_gated_delta_rule(packed_BTC, log_decay, beta, memory, mixer.key_width, mixer.qk_norm)


DELTA_RULE = Recurrence(
    step=delta_step,
    prepare=_sub_steps,
    scan=gated_delta_rule,
    packed=_packed,
    backends=Backends(
        takes=_takes,
        heads=f"{', '.join(map(str, KEY_WIDTHS))} key channels, in bfloat16 also of {WIDE_KEYS}, and a multiple of 16 "
        "value channels",
        names=("torch", "triton", "fla", "flash_qla"),
    ),
)
