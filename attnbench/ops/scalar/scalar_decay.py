"""Linear attention with one decay per head: definition, chunked form, backends and their choice.

    S_t = a_t S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t

The state is S (B, H, K, V). The query comes scaled, and the value weighted. Each head of query and key may serve
several adjacent heads of the value. A constant decay, as RetNet's, has a batch of 1 and is broadcast.
lagged_scalar_decay.py has positions that read themselves with their own weight, as Mamba-3's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.backends import Backends
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.common.scan import affine_scan, chunk_size

MAX_FORGETTING = 30.0
"""Largest -log a_t that a mixer should give. It keeps 1e-13 of the memory, nothing in float32. Beyond it cumulative log
decays over a chunk lose the digits of other positions, and on a GPU, with its order of addition, may not even fall."""


def scalar_step(
    memory_BHKV: Tensor, query_BHK: Tensor, key_BHK: Tensor, value_BHV: Tensor, log_decay_BH: Tensor
) -> tuple[Tensor, Tensor]:
    memory_BHKV = log_decay_BH.exp()[..., None, None] * memory_BHKV + outer(key_BHK, value_BHV)
    return memory_BHKV, read(memory_BHKV, query_BHK)


def weighted(value_BTHV: Tensor, write_BTH: Tensor | None) -> Tensor:
    return value_BTHV if write_BTH is None else (value_BTHV * write_BTH[..., None]).to(value_BTHV.dtype)


def _by_heads(
    query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, write_BTH: Tensor | None = None
) -> tuple[Tensor, ...]:
    repeats = value_BTHV.shape[2] // query_BTGK.shape[2]
    if repeats > 1:
        query_BTGK, key_BTGK = (x.repeat_interleave(repeats, 2) for x in (query_BTGK, key_BTGK))
    return query_BTGK, key_BTGK, weighted(value_BTHV, write_BTH), log_decay_BTH


def _scan(
    query_BTGK: Tensor,
    key_BTGK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor | None,
    memory_BHKV: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    written_BTHV = weighted(value_BTHV, write_BTH)
    return scalar_decay(query_BTGK, key_BTGK, written_BTHV, log_decay_BTH, memory_BHKV, backend)


def scalar_decay(
    query_BTGK: Tensor,
    key_BTGK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    memory_BHKV: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Compute y and the last memory with backend `torch` (the definition for a single position), `triton` or `fla`.
    With triton a single position updates the given memory. With triton and fla the last memory is None if none was
    given."""
    if backend == "triton":
        mixed_BTC = packed(query_BTGK, key_BTGK, value_BTHV)
        return packed_scalar_decay(mixed_BTC, log_decay_BTH, None, None, memory_BHKV, *query_BTGK.shape[2:])
    inputs = (query_BTGK, key_BTGK, value_BTHV, log_decay_BTH)
    if backend == "fla":
        from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]

        repeats = value_BTHV.shape[2] // query_BTGK.shape[2]
        query_BTHK, key_BTHK = (x.repeat_interleave(repeats, 2) for x in (query_BTGK, key_BTGK))
        log_decay_BTH = log_decay_BTH.expand(value_BTHV.shape[:3]).contiguous()
        options = {"initial_state": memory_BHKV, "output_final_state": memory_BHKV is not None}
        return chunk_simple_gla(query_BTHK, key_BTHK, value_BTHV, g=log_decay_BTH, scale=1.0, **options)
    if memory_BHKV is not None and value_BTHV.shape[1] == 1:
        return SCALAR_DECAY.define(*inputs, memory_BHKV)
    return chunked_scalar_decay(*inputs, memory_BHKV, chunk_size(value_BTHV.device.type))


def packed_scalar_decay(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor | None,
    own_BTH: Tensor | None,
    memory_BHKV: Tensor | None,
    num_groups: int,
    key_width: int,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same by our kernels from packed query, key and value, (GK | GK | HV).

    Args:
        write_BTH: write weight of a position's value; None for 1.
        own_BTH: weight of the value in its own output, see `lagged_scalar_decay`; None for `write_BTH`.
        memory_BHKV: the state before the first position; a single position updates it.
        scale: factor of the query.
    """
    if memory_BHKV is not None and mixed_BTC.shape[1] == 1:
        from attnbench.ops.scalar.triton.scalar_step import scalar_decay_step

        write_BTH = write_BTH if own_BTH is None else own_BTH
        write_BH = None if write_BTH is None else write_BTH[:, 0]
        log_decay_BH = log_decay_BTH[:, 0].expand(len(mixed_BTC), -1)
        y_BHV = scalar_decay_step(mixed_BTC[:, 0], log_decay_BH, write_BH, memory_BHKV, num_groups, scale)
        return y_BHV[:, None], memory_BHKV
    from attnbench.ops.scalar.triton import scalar_op as kernel

    y_BTHV, last_BHKV = kernel.scalar_decay(
        mixed_BTC,
        log_decay_BTH.expand(len(mixed_BTC), -1, -1),
        write_BTH,
        own_BTH,
        memory_BHKV,
        num_groups=num_groups,
        key_width=key_width,
        scale=scale,
        keep_memory=memory_BHKV is not None,
    )
    return y_BTHV, last_BHKV


def packed(query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor) -> Tensor:
    return torch.cat([x.to(value_BTHV.dtype).flatten(2) for x in (query_BTGK, key_BTGK, value_BTHV)], dim=-1)


def chunked_scalar_decay(
    query_BTGK: Tensor,
    key_BTGK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_positions: int,
) -> tuple[Tensor, Tensor]:
    """Compute the same by chunks of `num_positions`: masked products within, a scan over their states between. With c_i
    the sum of log decays from a chunk's start:

        y_i = exp(c_i) S^T q_i + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) v_j
        S' = exp(c_C) S + sum_j exp(c_C - c_j) k_j v_j^T

    Products run in the value's dtype, which y keeps; decays and states in that of the log decay.
    """
    (batch, length, heads, width), dtype = value_BTHV.shape, value_BTHV.dtype
    groups, key_width = query_BTGK.shape[2:]
    size = min(num_positions, length)
    # (N, B, G, H/G, positions, channels), where H/G is 1 for query and key.
    query, key, value = (_chunks(x, groups, size).to(dtype) for x in (query_BTGK, key_BTGK, value_BTHV))
    cumulative = _chunks(at_least_float32(log_decay_BTH)[..., None], groups, size).squeeze(-1).cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    # Masked before exp, which would overflow for future positions. In place, to save memory allocation on a CPU.
    decay = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    within = ((query @ key.mT) * decay).to(dtype) @ value
    left = (cumulative[..., -1:] - cumulative).exp().to(dtype)[..., None]
    addition = (key.mT @ (value * left)).to(cumulative.dtype)
    across = cumulative[..., -1].exp().expand(addition.shape[:-2])
    if memory_BHKV is None:
        memory_BHKV = addition.new_zeros(batch, heads, key_width, width)
    states, last = _carry(across.flatten(1, 3), addition.flatten(1, 3), memory_BHKV.flatten(0, 1))
    found = query @ states.unflatten(1, addition.shape[1:4]).to(dtype)
    mixed = within + found * cumulative.exp().to(dtype)[..., None]
    # Back from (N, B, G, H/G, positions, V).
    mixed = mixed.permute(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, width)
    return mixed[:, :length], last.unflatten(0, (batch, heads))


def _chunks(x_BTHC: Tensor, groups: int, size: int) -> Tensor:
    """Cut to (N, B, groups, H / groups, size, C); zero padding changes no state."""
    padded = F.pad(x_BTHC, (0, 0, 0, 0, 0, -x_BTHC.shape[1] % size))
    return padded.unflatten(2, (groups, -1)).unflatten(1, (-1, size)).permute(1, 0, 3, 4, 2, 5)


def _carry(decay_NX: Tensor, addition_NXKV: Tensor, initial_XKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before every chunk, (N, X, K, V), and the last, of S' = decay S + addition."""
    num_chunks, batch, key_width, width = addition_NXKV.shape
    # Writes depend on no state, so the scan has chunks without positions.
    no_key, no_write = (addition_NXKV.new_zeros(num_chunks, batch, 0, channels) for channels in (key_width, width))
    states, _ = affine_scan(decay_NX, no_key, no_key, no_write, addition_NXKV, initial_XKV.to(addition_NXKV.dtype))
    return states[:-1], states[-1]


def _takes(key_width: int, value_width: float, precision: str) -> bool:
    return key_width in range(16, 129, 16) and value_width > 0 and value_width % 16 == 0


def _packed(
    mixer: Any, packed_BTC: Tensor, log_decay: Tensor, write: Tensor | None, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    shape = (mixer.widths()[0] // mixer.key_width, mixer.key_width, mixer.scale)
    return packed_scalar_decay(packed_BTC, log_decay, write, None, memory, *shape)


SCALAR_DECAY = Recurrence(
    step=scalar_step,
    prepare=_by_heads,
    scan=_scan,
    packed=_packed,
    backends=Backends(takes=_takes, heads="16 to 128 key channels and any value channels, both a multiple of 16"),
)
