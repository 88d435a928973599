"""Softmax attention (Vaswani et al., 2017): definition, materialised weights, fused kernels and their choice.

    y_t = sum_(s <= t) a_ts v_s,   a_ts = exp(q_t . k_s / sqrt(K)) / sum_(r <= t) exp(q_t . k_r / sqrt(K))

Query heads may share a key/value head (Ainslie et al., 2023), and a window may hide earlier positions. With fewer
queries than keys, queries are at the last positions. The state is a cache of keys and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.machine.device import require_triton
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, load_flash_attn
from attnbench.ops.common.precision import at_least_float32
from attnbench.settings.errors import UserError

SDPA_KERNELS = {"sdpa": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

KERNELS = {"sdpa": "sdpa_flash", "cudnn": "sdpa_cudnn", "flash_attn": "flash_attn", "triton": "triton"}
"""Backends of the flash mixer, with their names in IMPLEMENTATIONS."""

AUTO_RULE = "CUDA: cudnn in bfloat16, triton in float32; CPU: sdpa; triton with a window"


def definition(
    query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, window: int | None, log_forget_BTH: Tensor | None = None
) -> Tensor:
    """Compute y position by position and head by head; (B, T, H, V)."""
    length, num_heads, width = query_BTHK.shape[1:]
    shared_by = num_heads // key_BTHK.shape[2]
    rows = []
    for position in range(length):
        first = 0 if window is None else max(0, position + 1 - window)
        heads = []
        for head in range(num_heads):
            key_BSK = key_BTHK[:, first : position + 1, head // shared_by]
            value_BSV = value_BTHV[:, first : position + 1, head // shared_by]
            score_BS = torch.bmm(key_BSK, query_BTHK[:, position, head, :, None])[..., 0] / width**0.5
            if log_forget_BTH is not None:
                # Summed backwards from the query over the positions after each key.
                after_BS = log_forget_BTH[:, first + 1 : position + 1, head].flip(1).cumsum(1).flip(1)
                score_BS = score_BS + F.pad(after_BS, (0, 1))
            odds_BS = (score_BS - score_BS.amax(dim=1, keepdim=True)).exp()
            weight_BS = (odds_BS / odds_BS.sum(dim=1, keepdim=True)).to(value_BSV.dtype)
            heads.append(torch.bmm(weight_BS[:, None], value_BSV)[:, 0])
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows, dim=1)


def attend(
    query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor, visible_TS: Tensor, bias_BHTS: Tensor | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(K) + bias) v with materialised weights; (B, T, H, V)."""
    num_groups, width = key_BSHK.shape[2:]
    # Query heads are grouped by key/value head, so that these need not be repeated.
    query_BTGHK = (query_BTHK * width**-0.5).unflatten(2, (num_groups, -1))
    score_BGHTS = torch.einsum("btghk,bsgk->bghts", query_BTGHK, key_BSHK)
    # Float32 at least: bfloat16 loses the small terms of a sum over the length.
    score_BGHTS = at_least_float32(score_BGHTS)
    if bias_BHTS is not None:
        score_BGHTS = score_BGHTS + bias_BHTS.unflatten(1, (num_groups, -1))
    weight_BGHTS = score_BGHTS.masked_fill(~visible_TS, float("-inf")).softmax(dim=-1).to(value_BSHV.dtype)
    return torch.einsum("bghts,bsgv->btghv", weight_BGHTS, value_BSHV).flatten(2, 3)


def visible(past: Tensor, window: int | None) -> Tensor:
    """Return whether a key `past` positions back is not in the future, and within `window`."""
    return past >= 0 if window is None else (past >= 0) & (past < window)


def materialised(
    query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor, window: int | None, bias_BHTS: Tensor | None = None
) -> Tensor:
    """`attend` from the last T of S positions to all S; (B, T, H, V)."""
    position_S = torch.arange(key_BSHK.shape[1], device=key_BSHK.device)
    past_TS = position_S[-query_BTHK.shape[1] :, None] - position_S
    return attend(query_BTHK, key_BSHK, value_BSHV, visible(past_TS, window), bias_BHTS)


def fused(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, window: int | None, backend: str) -> Tensor:
    """Attend from the last T of S positions to all S by one of KERNELS; (B, T, H, K)."""
    if backend == "cudnn" and key_BSHK.shape[1] == 1:
        # It refuses a single key, whose weight is 1.
        return value_BSHK.repeat_interleave(query_BTHK.shape[2] // value_BSHK.shape[2], dim=2)
    if backend in SDPA_KERNELS:
        return _sdpa(query_BTHK, key_BSHK, value_BSHK, SDPA_KERNELS[backend])
    # With fewer queries than keys, both align the causal mask to the last position.
    if backend == "flash_attn":
        sizes = (-1, -1) if window is None else (window - 1, 0)
        return load_flash_attn()(query_BTHK, key_BSHK, value_BSHK, causal=True, window_size=sizes)
    from attnbench.ops.attention.triton.flash_op import flash_attention

    return flash_attention(query_BTHK, key_BSHK, value_BSHK, causal=True, window=window)


def fused_packed(
    mixed_BTC: Tensor, angles: Tensor | None, num_heads: int, num_key_value_heads: int, window: int | None
) -> Tensor:
    """Attend by our kernel from packed query, key and value, rotated inside by `angles`, if given; (B, T, H × K)."""
    from attnbench.ops.attention.triton.flash_op import packed_flash_attention

    return packed_flash_attention(
        mixed_BTC, angles, num_heads=num_heads, num_key_value_heads=num_key_value_heads, causal=True, window=window
    )


def decode(
    query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, position: Tensor, window: int | None, backend: str
) -> Tensor:
    """Attend from a single query, T = 1, at `position` to the filled part of a cache; (B, 1, H, K).

    triton reads the filled part alone. Others multiply by the whole cache and mask the rest: shapes do not depend on
    the position, as a captured CUDA graph requires.
    """
    if backend == "triton":
        from attnbench.ops.attention.triton.flash_decoding import flash_decoding

        return flash_decoding(query_BTHK[:, 0], key_BSHK, value_BSHK, position, window=window)[:, None]
    past_S = position - torch.arange(key_BSHK.shape[1], device=query_BTHK.device)
    return attend(query_BTHK, key_BSHK, value_BSHK, visible(past_S, window)[None])


def attention_flops(
    length: int, num_heads: int, head_width: int, window: int | None = None, value_width: int | None = None
) -> int:
    """Count 2 K for the score and 2 V for the weighted sum, per head and visible pair of positions. V is K if
    `value_width` is None."""
    unseen = max(0, length - window) if window is not None else 0
    pairs = length * (length + 1) // 2 - unseen * (unseen + 1) // 2
    return pairs * num_heads * 2 * (head_width + (head_width if value_width is None else value_width))


def _sdpa(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, kernel: SDPBackend) -> Tensor:
    query_BHTK, key_BHSK, value_BHSK = (x.transpose(1, 2) for x in (query_BTHK, key_BSHK, value_BSHK))
    length, source = query_BHTK.shape[2], key_BHSK.shape[2]
    if length in (1, source):
        # A single query sees everything.
        return _unmasked(query_BHTK, key_BHSK, value_BHSK, kernel, is_causal=length == source).transpose(1, 2)
    # `is_causal` would align the mask to the first key. The CUDA flash kernel takes no mask but a causal one aligned to
    # the last position; the CPU's and cuDNN's take only a mask.
    if query_BHTK.device.type == "cuda" and kernel == SDPBackend.FLASH_ATTENTION:
        # Imported here: loads torch's compiler, which takes over a second.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(length, source)
    else:
        position_S = torch.arange(source, device=query_BHTK.device)
        mask = position_S <= position_S[-length:, None]
    grouped = query_BHTK.shape[1] != key_BHSK.shape[1]
    with sdpa_kernel(kernel):
        mixed_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, attn_mask=mask, enable_gqa=grouped
        )
    return mixed_BHTK.transpose(1, 2)


def _unmasked(
    query_BHTK: Tensor, key_BHSK: Tensor, value_BHSK: Tensor, kernel: SDPBackend, *, is_causal: bool
) -> Tensor:
    """Call the operator that scaled_dot_product_attention would dispatch to. `sdpa_kernel` sets process state, which
    would keep torch's compiler from caching the graph."""
    device_type = query_BHTK.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast only knows the enclosing function.
        dtype = torch.get_autocast_dtype(device_type)
        query_BHTK, key_BHSK, value_BHSK = (
            x.to(dtype) if x.dtype == torch.float32 else x for x in (query_BHTK, key_BHSK, value_BHSK)
        )
    inputs, dropout, aten = (query_BHTK, key_BHSK, value_BHSK), 0.0, torch.ops.aten
    if kernel == SDPBackend.CUDNN_ATTENTION:
        with_sums = torch.is_grad_enabled()
        return aten._scaled_dot_product_cudnn_attention(*inputs, None, with_sums, dropout, is_causal)[0]
    if device_type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(*inputs, dropout, is_causal)[0]
    return aten._scaled_dot_product_flash_attention(*inputs, dropout, is_causal)[0]


def choose_fused(backend: str, *, window: int | None, head_width: int | None, device_type: str, precision: str) -> str:
    """Resolve `auto`, and raise UserError if the kernel does not support the inputs; `head_width` is None if not known
    yet."""
    resolved = resolve_fused(backend, window, head_width, device_type, precision)
    if device_type == "cuda":
        _check_cuda(resolved, head_width, precision)
    elif window is not None and backend == "auto":
        raise UserError(
            f"attn.window={window}: a sliding window needs CUDA, device={device_type} has none; choose attn.window=null"
        )
    elif not IMPLEMENTATIONS[KERNELS[resolved]].on_cpu:
        raise UserError(
            f"attn.backend={resolved}: its kernels run on CUDA alone, not on device={device_type}; "
            "choose attn.backend=sdpa attn.window=null"
        )
    if resolved == "triton":
        require_triton(f"attn.backend={resolved}", device_type)
        if device_type == "cpu" and precision == "bfloat16":
            raise UserError(
                f"train.precision={precision}: Triton's interpreter computes no products in bfloat16 for "
                f"attn.backend={resolved}; choose train.precision=float32"
            )
    if resolved == "flash_attn":
        load_flash_attn()
    return resolved


def resolve_fused(backend: str, window: int | None, head_width: int | None, device_type: str, precision: str) -> str:
    """Resolve `auto` by AUTO_RULE; refuse a window below 1, or for a kernel without windows."""
    if window is not None and window < 1:
        raise UserError(f"attn.window={window}: must be at least 1, or null for none")
    if window is not None and backend != "auto" and not IMPLEMENTATIONS[KERNELS[backend]].window:
        raise UserError(
            f"attn.window={window}: attn.backend={backend} has no sliding window; "
            "choose attn.backend=triton or attn.window=null"
        )
    if backend != "auto":
        return backend
    if window is not None:
        return "triton"
    if device_type != "cuda":
        return "sdpa"
    if precision != "bfloat16":
        return "triton"
    return "cudnn" if head_width is None or head_width <= IMPLEMENTATIONS["sdpa_cudnn"].max_width else "sdpa"


def _check_cuda(backend: str, head_width: int | None, precision: str) -> None:
    kernel = IMPLEMENTATIONS[KERNELS[backend]]
    if precision not in kernel.precisions:
        raise UserError(
            f"train.precision={precision}: attn.backend={backend} needs half precision on CUDA; "
            "choose train.precision=bfloat16 or attn.backend=triton"
        )
    if head_width is not None and kernel.widths is not None and head_width not in kernel.widths:
        step = kernel.widths[0]
        allowed = f"a multiple of {step}" if step > 1 else "a width"
        raise UserError(
            f"head_width={head_width}: attn.backend={backend} needs {allowed} up to {kernel.max_width} on CUDA; "
            "choose such a width or attn=softmax"
        )
