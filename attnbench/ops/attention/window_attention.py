"""Softmax attention within a sliding window, in blocks of the window's size: each block sees itself and the block
before it, so that work and memory grow linearly with the length."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.ops.attention.softmax_attention import attend, choose_fused, decode, fused, materialised, visible
from attnbench.settings.errors import UserError

AUTO_RULE = "CUDA: triton up to 128 channels a head; otherwise torch"


def window_attention(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, window: int, backend: str) -> Tensor:
    """Attend from the last T of S positions to themselves and the window - 1 before each; (B, T, H, K)."""
    if backend != "torch":
        return fused(query_BTHK, key_BSHK, value_BSHK, window, backend)
    # Up to two blocks, the block form would leave nothing out.
    form = materialised if key_BSHK.shape[1] <= 2 * window else in_blocks
    return form(query_BTHK, key_BSHK, value_BSHK, window)


def window_step(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, position: Tensor, backend: str) -> Tensor:
    """Attend from a single query at `position` to the filled part of a cache of the window, in any order; (B, 1, H,
    K)."""
    last = position.clamp(max=key_BSHK.shape[1] - 1)
    return decode(query_BTHK, key_BSHK, value_BSHK, last, None, backend)


def in_blocks(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, window: int) -> Tensor:
    """Materialise each block's weights; (B, T, H, K)."""
    batch_size, length = key_BSHK.shape[:2]
    ahead, behind = length - query_BTHK.shape[1], -length % window
    query_BNWHK = F.pad(query_BTHK, (0, 0, 0, 0, ahead, behind)).unflatten(1, (-1, window))
    # Blocks of keys; the first is of zeros and masked.
    key_BNWHK, value_BNWHK = (
        F.pad(x, (0, 0, 0, 0, window, behind)).unflatten(1, (-1, window)) for x in (key_BSHK, value_BSHK)
    )
    key_BNSHK, value_BNSHK = (torch.cat([x[:, :-1], x[:, 1:]], dim=2) for x in (key_BNWHK, value_BNWHK))
    position_W = torch.arange(window, device=key_BSHK.device)
    position_S = torch.arange(2 * window, device=key_BSHK.device) - window
    block_N = torch.arange(query_BNWHK.shape[1], device=key_BSHK.device)[:, None, None]
    is_there_NWS = block_N * window + position_S >= 0
    visible_NWS = visible(position_W[:, None] - position_S, window) & is_there_NWS
    query_XWHK, key_XSHK, value_XSHK = (x.flatten(0, 1) for x in (query_BNWHK, key_BNSHK, value_BNSHK))
    visible_XWS = visible_NWS.repeat(batch_size, 1, 1)
    mixed_XWHK = attend(query_XWHK, key_XSHK, value_XSHK, visible_XWS[:, None, None])
    return mixed_XWHK.unflatten(0, (batch_size, -1)).flatten(1, 2)[:, ahead:length]


def choose_beside_torch(
    backend: str, *, window: int | None, head_width: int | None, device_type: str, precision: str
) -> str:
    """Choose as `choose_fused` does, with `auto` by AUTO_RULE."""
    if backend == "auto":
        fits = head_width is None or head_width <= IMPLEMENTATIONS["triton"].max_width
        backend = "triton" if device_type == "cuda" and fits else "torch"
    if backend == "torch":
        return backend
    if device_type != "cuda" and backend != "triton":
        raise UserError(f"attn.backend={backend}: runs on CUDA alone, not on device={device_type}; use backend=torch")
    return choose_fused(backend, window=window, head_width=head_width, device_type=device_type, precision=precision)
