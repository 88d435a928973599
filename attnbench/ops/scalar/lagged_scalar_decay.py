"""The recurrence of scalar_decay.py, where positions read themselves with their own weight.

y_t = a_t S_{t-1}^T q_t + own_t (q_t . k_t) v_t,   S_t = a_t S_{t-1} + write_t k_t v_t^T
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY, packed, packed_scalar_decay, scalar_decay


def lagged_step(
    memory_BHKV: Tensor,
    query_BHK: Tensor,
    key_BHK: Tensor,
    value_BHV: Tensor,
    log_decay_BH: Tensor,
    write_BH: Tensor,
    own_BH: Tensor,
) -> tuple[Tensor, Tensor]:
    memory_BHKV = log_decay_BH.exp()[..., None, None] * memory_BHKV
    score_BH1 = (query_BHK[..., None, :] @ key_BHK[..., None]).squeeze(-1)
    found_BHV = read(memory_BHKV, query_BHK)
    mixed_BHV = found_BHV + own_BH[..., None] * score_BH1 * value_BHV
    return memory_BHKV + outer(key_BHK, write_BH[..., None] * value_BHV), mixed_BHV


def lagged_scalar_decay(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor,
    own_BTH: Tensor,
    memory_BHKV: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same by `scalar_decay` with any backend, of keys, values and decays shifted by one position, which
    gives S_{t-1} at t. So write_t may depend on position t + 1 without leaking into y_t by rounding.

    Return y (B, T, H, V) in the value's dtype, and the last memory as `scalar_decay`, but with weight own_T for the
    last position; write_T, which depends on the next position, is not read.
    """
    if backend == "triton":
        mixed_BTC, gates = packed(query_BTHK, key_BTHK, value_BTHV), (log_decay_BTH, write_BTH, own_BTH)
        return packed_lagged_scalar_decay(mixed_BTC, *gates, memory_BHKV, *query_BTHK.shape[2:])
    decay_BTH = log_decay_BTH.exp()
    if memory_BHKV is None:
        shape = (value_BTHV.shape[0], *value_BTHV.shape[2:3], key_BTHK.shape[-1], value_BTHV.shape[-1])
        memory_BHKV = decay_BTH.new_zeros(shape)
    written_BTHV = (value_BTHV * write_BTH[..., None]).to(value_BTHV.dtype)
    key, value, log_decay = (_one_late(x) for x in (key_BTHK, written_BTHV, log_decay_BTH))
    mixed_BTHV, before_BHKV = scalar_decay(query_BTHK, key, value, log_decay, memory_BHKV, backend)
    assert before_BHKV is not None
    score_BTH = (at_least_float32(query_BTHK) * key_BTHK).sum(-1)
    # Both terms in float32, because their sizes may differ greatly.
    mixed_BTHV = decay_BTH[..., None] * mixed_BTHV + (own_BTH * score_BTH)[..., None] * value_BTHV
    own_BHV = own_BTH[:, -1, :, None] * value_BTHV[:, -1]
    last_BHKV = decay_BTH[:, -1, :, None, None] * before_BHKV + key_BTHK[:, -1, :, :, None] * own_BHV[:, :, None, :]
    return mixed_BTHV.to(value_BTHV.dtype), last_BHKV


def packed_lagged_scalar_decay(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor,
    own_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_heads: int,
    key_width: int,
) -> tuple[Tensor, Tensor | None]:
    # The kernels also write the last position to the memory, with its own weight here.
    write_BTH = torch.cat([write_BTH[:, :-1], own_BTH[:, -1:]], dim=1)
    return packed_scalar_decay(mixed_BTC, log_decay_BTH, write_BTH, own_BTH, memory_BHKV, num_heads, key_width)


def lagged_scalar_decay_step(
    query_B1HK: Tensor,
    key_B1HK: Tensor,
    value_B1HV: Tensor,
    log_decay_B1H: Tensor,
    own_B1H: Tensor,
    memory_BHKV: Tensor,
    late_pair: tuple[Tensor, Tensor],
    late_BH: Tensor,
) -> Tensor:
    """Compute y of a single position by our kernel, (B, 1, H, V), and update the memory in place, also by the previous
    position's missing write.

    Args:
        late_pair: its key (B, H, K) and value (B, H, V), rotated and in float32.
        late_BH: its missing write weight, which depends on this position.
    """
    from attnbench.ops.scalar.triton.scalar_step import scalar_decay_step

    mixed_BC, num_heads = packed(query_B1HK, key_B1HK, value_B1HV)[:, 0], query_B1HK.shape[2]
    gates = (log_decay_B1H[:, 0], own_B1H[:, 0])
    return scalar_decay_step(mixed_BC, *gates, memory_BHKV, num_heads, 1.0, *late_pair, late_BH)[:, None]


def _one_late(x_BTX: Tensor) -> Tensor:
    return F.pad(x_BTX[:, :-1], (0, 0) * (x_BTX.dim() - 2) + (1, 0))


LAGGED_SCALAR_DECAY = Recurrence(step=lagged_step, scan=lagged_scalar_decay, backends=SCALAR_DECAY.backends)
