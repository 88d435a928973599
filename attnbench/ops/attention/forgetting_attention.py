"""Softmax attention with forget gates (Lin et al., 2025), by torch with materialised weights and by our kernels.

    y_t = sum_(s <= t) a_ts v_s,   a_ts proportional to exp(q_t . k_s / sqrt(K) + log f_(s+1) + ... + log f_t)

The state is a cache of keys and values, and `bias_BSH`, the sum of log f over the positions after each.
"""

import torch
from torch import Tensor

from attnbench.ops.attention.softmax_attention import attend, materialised, visible
from attnbench.ops.common.cumulative_sum import cumulative_sum


def forgetting_bias(log_forget_BTH: Tensor, past_BSH: Tensor | None = None) -> Tensor:
    """Return log f_(s+1) + ... + log f_t for each pair of positions, as a difference of cumulative sums; (B, H, T, S).
    Pairs with s > t must be masked.

    Args:
        log_forget_BTH: in float32 at least, for sums over long texts.
        past_BSH: sum of log f from each earlier position to the last of them.
    """
    sum_BHT = cumulative_sum(log_forget_BTH).mT
    source_BHS = sum_BHT if past_BSH is None else torch.cat([-past_BSH.mT, sum_BHT], dim=2)
    return sum_BHT[..., None] - source_BHS[:, :, None]


def forgetting_attention(
    query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, log_forget_BTH: Tensor, backend: str
) -> Tensor:
    """Attend from T positions to themselves, S = T; (B, T, H, K). log f is in float32 at least."""
    if backend == "torch":
        return materialised(query_BTHK, key_BSGK, value_BSGK, None, forgetting_bias(log_forget_BTH))
    from attnbench.ops.attention.triton.cumulative_gates import cumulative_log_forget
    from attnbench.ops.attention.triton.flash_op import flash_attention

    return flash_attention(query_BTHK, key_BSGK, value_BSGK, cumulative_log_forget(log_forget_BTH), causal=True)


def forgetting_prefill(
    query_BTHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, log_forget_BTH: Tensor, bias_BSH: Tensor, backend: str
) -> Tensor:
    """Attend from the last T of S positions to all S; (B, T, H, K). Update `bias_BSH`, of all S positions."""
    start = key_BSGK.shape[1] - query_BTHK.shape[1]
    past_BSH = bias_BSH[:, :start]
    if backend == "torch":
        bias_BHTS = forgetting_bias(log_forget_BTH, past_BSH)
        # The bias seen from the last query is the next state.
        bias_BSH.copy_(bias_BHTS[:, :, -1].mT)
        return materialised(query_BTHK, key_BSGK, value_BSGK, None, bias_BHTS)
    from attnbench.ops.attention.triton.cumulative_gates import cumulative_log_forget
    from attnbench.ops.attention.triton.flash_op import flash_attention

    # Sums start at the first of the T positions and run back from there.
    sum_BHT = cumulative_log_forget(log_forget_BTH)
    cumulative_BHS = torch.cat([-past_BSH.mT.double(), sum_BHT], dim=2)
    bias_BSH.copy_((sum_BHT[:, :, -1:] - cumulative_BHS).mT)
    return flash_attention(query_BTHK, key_BSGK, value_BSGK, cumulative_BHS, causal=True)


def forgetting_step(
    query_BTHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    log_forget_BTH: Tensor,
    bias_BSH: Tensor,
    position: Tensor,
    backend: str,
) -> Tensor:
    """Attend from a single query at `position` to the filled part of a cache, and update `bias_BSH`; (B, 1, H, K)."""
    if backend == "torch":
        # Entries ahead change too; they are set to 0 when their position is written.
        bias_BSH.add_(log_forget_BTH)
        bias_BSH.index_fill_(1, position[None], 0.0)
        past_S = position - torch.arange(key_BSGK.shape[1], device=query_BTHK.device)
        return attend(query_BTHK, key_BSGK, value_BSGK, visible(past_S, None)[None], bias_BSH.mT[:, :, None])
    from attnbench.ops.attention.triton.flash_decoding import forgetting_decoding

    newest = (query_BTHK[:, 0], key_BSGK, value_BSGK, log_forget_BTH[:, 0], bias_BSH, position)
    return forgetting_decoding(*newest)[:, None]
