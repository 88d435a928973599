"""mLSTM's memory with exponential write gate and normaliser (Beck et al., 2024): definition and fast form.

    S_t = f_t S_{t-1} + i_t k_t v_t^T,   n_t = f_t n_{t-1} + i_t k_t,   y_t = S_t^T q_t / max(|n_t . q_t|, 1)

i = exp(log_write) overflows, so the state is S exp(-m) and n exp(-m), where m follows the largest term:

    m_t = max(log f_t + m_{t-1}, log i_t),   y_t = S_t^T q_t / max(|n_t . q_t|, exp(-m_t))

Neither y nor its gradient depends on m: every m that keeps numbers finite is right, and m is not differentiated. The
query comes scaled. The state is S (B, H, K, V), n (B, H, K) and m (B, H) >= 0, so that exp(-m) does not overflow.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.cumulative_sum import cumulative_sum
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING, SCALAR_DECAY, scalar_decay


class Memory(NamedTuple):
    """S exp(-m), n exp(-m) and m, in float32 at least."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    maximum_BH: Tensor


def mlstm_step(
    memory: tuple[Tensor, Tensor, Tensor],
    query_BHK: Tensor,
    key_BHK: Tensor,
    value_BHV: Tensor,
    log_forget_BH: Tensor,
    log_write_BH: Tensor,
) -> tuple[Memory, Tensor]:
    memory_BHKV, normaliser_BHK, maximum_BH = memory
    kept_BH = log_forget_BH + maximum_BH
    maximum_BH = torch.maximum(kept_BH, log_write_BH)
    forget_BH1, write_BH1 = ((x - maximum_BH).exp()[..., None] for x in (kept_BH, log_write_BH))
    key_BHK = write_BH1 * key_BHK
    memory_BHKV = forget_BH1[..., None] * memory_BHKV + outer(key_BHK, value_BHV)
    normaliser_BHK = forget_BH1 * normaliser_BHK + key_BHK
    mixed_BHV = _normalised(read(memory_BHKV, query_BHK), read(normaliser_BHK[..., None], query_BHK), maximum_BH)
    return Memory(memory_BHKV, normaliser_BHK, maximum_BH), mixed_BHV


def mlstm(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_forget_BTH: Tensor,
    log_write_BTH: Tensor,
    memory: Memory | None,
    backend: str,
) -> tuple[Tensor, Memory | None]:
    """Compute the same by `scalar_decay`, with n as one more column of S, of a value of 1. Return y (B, T, H, V) in
    float32 at least, and the last memory, None if `scalar_decay` has none."""
    log_decay_BTH, write_BTH, maximum_BTH = stabilised(
        log_forget_BTH, log_write_BTH, None if memory is None else memory.maximum_BH
    )
    if backend == "triton" and memory is not None and query_BTHK.shape[1] == 1:
        return _step_in_place(query_BTHK, key_BTHK, value_BTHV, log_decay_BTH, write_BTH, maximum_BTH, memory)
    width = value_BTHV.shape[-1]
    # Our kernels take multiples of 16 columns; flash-linear-attention refuses odd numbers in bfloat16.
    padding = 0 if backend == "torch" else -(width + 1) % 16
    columns = torch.cat([value_BTHV, torch.ones_like(value_BTHV[..., :1])], dim=-1)
    columns = F.pad((columns * write_BTH[..., None]).to(value_BTHV.dtype), (0, padding))
    before = None
    if memory is not None:
        before = F.pad(torch.cat([memory.memory_BHKV, memory.normaliser_BHK[..., None]], dim=-1), (0, padding))
    mixed, last = scalar_decay(query_BTHK, key_BTHK, columns, log_decay_BTH, before, backend)
    y_BTHV = _normalised(mixed[..., :width], mixed[..., width : width + 1], maximum_BTH)
    after = None if last is None else Memory(last[..., :width], last[..., width], maximum_BTH[:, -1])
    return y_BTHV, after


def _step_in_place(
    query_B1HK: Tensor,
    key_B1HK: Tensor,
    value_B1HV: Tensor,
    log_decay_B1H: Tensor,
    write_B1H: Tensor,
    maximum_B1H: Tensor,
    memory: Memory,
) -> tuple[Tensor, Memory]:
    value = (value_B1HV * write_B1H[..., None]).to(value_B1HV.dtype)
    mixed, _ = scalar_decay(query_B1HK, key_B1HK, value, log_decay_B1H, memory.memory_BHKV, "triton")
    decay_BH1, write_BH1 = log_decay_B1H[:, 0, :, None].exp(), write_B1H[:, 0, :, None]
    normaliser_BHK = decay_BH1 * memory.normaliser_BHK + write_BH1 * key_B1HK[:, 0]
    total_B1H1 = (query_B1HK * normaliser_BHK[:, None]).sum(-1, keepdim=True)
    return _normalised(mixed, total_B1H1, maximum_B1H), memory._replace(
        normaliser_BHK=normaliser_BHK, maximum_BH=maximum_B1H[:, -1]
    )


def _normalised(mixed_BTHV: Tensor, total_BTH1: Tensor, maximum_BTH: Tensor) -> Tensor:
    return mixed_BTHV / torch.maximum(total_BTH1.abs(), (-maximum_BTH).exp()[..., None])


def stabilised(
    log_forget_BTH: Tensor, log_write_BTH: Tensor, maximum_BH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log decay and write weight, both for S exp(-m), and m, (B, T, H) each.

    In parallel over positions: with F_t = log f_1 + ... + log f_t, m_t = F_t + max(m_0, max_{s<=t} (max(log i_s, 0) -
    F_s)). Rounding of F only affects m, and so no result.
    """
    with torch.no_grad():
        total_BTH = cumulative_sum(log_forget_BTH)
        highest_BTH = (log_write_BTH.clamp(min=0) - total_BTH).cummax(1).values
        if maximum_BH is None:
            maximum_BH = torch.zeros_like(total_BTH[:, 0])
        maximum_BTH = (total_BTH + torch.maximum(highest_BTH, maximum_BH[:, None])).clamp(min=0)
        fall_BTH = torch.cat([maximum_BH[:, None], maximum_BTH[:, :-1]], dim=1) - maximum_BTH
    log_decay_BTH = (log_forget_BTH + fall_BTH).clamp(min=-MAX_FORGETTING)
    return log_decay_BTH, (log_write_BTH - maximum_BTH).exp(), maximum_BTH


def _scan(*inputs: Any) -> tuple[Tensor, Memory | None]:
    query, key, value, log_forget, log_write, memory, backend = inputs
    before = None if memory is None else Memory(*memory)
    return mlstm(query, key, value, log_forget, log_write, before, backend)


MLSTM_RECURRENCE = Recurrence(step=mlstm_step, scan=_scan, is_wide=True, backends=SCALAR_DECAY.backends)
