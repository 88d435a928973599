"""Attention of one new position over a cache, split into parts that are read in parallel (Dao et al., 2023).

    y = sum_s p_s v_s,   p_s = exp(c q . k_s) / sum_r exp(c q . k_r),   c = 1 / sqrt(K)

over the filled positions s. If there are fewer sequences × heads than multiprocessors, each program reads one split of
the keys; a second kernel combines their largest scores, sums of exponentials and weighted sums of values. The number of
filled positions is read on the device, so that a captured CUDA graph decodes at every position.

Forget gates (Lin et al., 2025) add log f_(s+1) + ... + log f_t to the score of s. These sums are stored beside the
cache and updated by the kernel.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnbench.ops.attention.triton.flash_decoding_kernels import combine_kernel, grouped_kernel, single_kernel
from attnbench.ops.attention.triton.flash_parts import check_heads
from attnbench.ops.common.triton.launching import num_multiprocessors
from attnbench.ops.common.triton.products import float32_product
from attnbench.ops.layers.triton.rotary_kernels import padded_width

MAX_WIDTH = 256
"""Channels per head; padded to a power of two."""

MAX_SPLITS = 128
PROGRAMS = 4
"""Target number of programs per multiprocessor: as many as run there at once."""


class Tiles(NamedTuple):
    """Launch of the first kernel; changes results by rounding only."""

    keys: int
    num_warps: int
    num_stages: int


def tiles_for(dtype: torch.dtype, width: int) -> Tiles:
    row_bytes = padded_width(width) * dtype.itemsize
    return Tiles(min(64, max(16, 8192 // row_bytes)), 4, 4)


def splits_for(num_keys: int, num_sequences: int, num_multiprocessors: int, keys: int = 64) -> int:
    """Return the splits that give a multiprocessor up to PROGRAMS programs, each with at least one block of `keys`
    keys. `num_sequences` is batch × key/value heads. If every multiprocessor has a program, splitting is slower."""
    if num_sequences == 0 or num_sequences >= num_multiprocessors:
        return 1
    wanted = PROGRAMS * num_multiprocessors // num_sequences
    return max(1, min(wanted, -(-num_keys // keys), MAX_SPLITS))


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    window: int,
    splits: int,
    tiles: Tiles,
    grouped: bool,
    log_forget: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    (B, H, K), G = query.shape, key.shape[2]
    mixed = query.new_empty(query.shape)
    partial = mixed if splits == 1 else query.new_empty((B, H, splits, K), dtype=torch.float32)
    largest = total = partial
    if splits > 1:
        largest, total = query.new_empty((2, B, H, splits), dtype=torch.float32)
    kernel: Any = grouped_kernel if grouped else single_kernel
    with torch.cuda.device_of(query):
        kernel[(B * G, splits)](
            query, query.stride()[:2], key, key.stride()[:3], value, value.stride()[:3],
            log_forget, bias, None if bias is None else bias.stride(0), position, partial, largest, total, K**-0.5,
            FORGETS=bias is not None, HEADS=H, SHARED_BY=H // G, MEMBERS=max(16, triton.next_power_of_2(H // G)),
            WIDTH=K, PADDED=padded_width(K), WINDOW=window, SPLITS=splits, KEYS=tiles.keys, STAGES=tiles.num_stages,
            PRECISION=float32_product(), num_warps=tiles.num_warps,
        )  # fmt: skip
        if splits > 1:
            channels = min(32, padded_width(K))
            combine_kernel[(B * H, -(-K // channels))](
                partial, largest, total, mixed,
                WIDTH=K, CHANNELS=channels, SPLITS=splits, PADDED_SPLITS=triton.next_power_of_2(splits),
            )  # fmt: skip
    return mixed


def _check(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> None:
    check_heads(query, key, value, MAX_WIDTH)
    if key.shape != value.shape:
        raise ValueError(f"keys of {key.shape[-1]} channels, values of {value.shape[-1]}: both must have as many")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise ValueError("channels of query, key and value must lie side by side")
    if position.dim() or position.dtype != torch.int64 or position.device != query.device:
        raise ValueError("position must be one int64 number on the device of the query")


@torch.library.custom_op("attnbench::flash_decoding", mutates_args=())
def _flash_decoding(
    query_BHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, position: Tensor, window: int, splits: int
) -> Tensor:
    _check(query_BHK, key_BSGK, value_BSGK, position)
    (_, H, K), G = query_BHK.shape, key_BSGK.shape[2]
    tiles = tiles_for(query_BHK.dtype, K)
    return _decode(query_BHK, key_BSGK, value_BSGK, position, window, splits, tiles, H > G)


_flash_decoding.register_fake(lambda query, *_: query.new_empty(query.shape))


@torch.library.custom_op("attnbench::forgetting_decoding", mutates_args=("bias_BSH",))
def _forgetting_decoding(
    query_BHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    log_forget_BH: Tensor,
    bias_BSH: Tensor,
    position: Tensor,
    splits: int,
) -> Tensor:
    _check(query_BHK, key_BSGK, value_BSGK, position)
    (B, H, K), (S, G) = query_BHK.shape, key_BSGK.shape[1:3]
    for name, x, shape in (("log_forget", log_forget_BH, (B, H)), ("bias", bias_BSH, (B, S, H))):
        if x.shape != shape or x.dtype != torch.float32:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, must be float32 {shape}")
    if bias_BSH.stride()[1:] != (H, 1):
        raise ValueError("heads and positions of bias must lie side by side")
    gates, tiles = (log_forget_BH.contiguous(), bias_BSH), tiles_for(query_BHK.dtype, K)
    return _decode(query_BHK, key_BSGK, value_BSGK, position, 0, splits, tiles, H > G, *gates)


_forgetting_decoding.register_fake(lambda query, *_: query.new_empty(query.shape))


def forgetting_decoding(
    query_BHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    log_forget_BH: Tensor,
    bias_BSH: Tensor,
    position: Tensor,
    *,
    splits: int | None = None,
) -> Tensor:
    """`flash_decoding` of heads with forget gates; (B, H, K).

    Args:
        log_forget_BH: log f of the position, float32.
        bias_BSH: sum of log f from each filled position to the one before this, float32; this position is added.
    """
    splits = _number_of_splits(splits, None, query_BHK, key_BSGK)
    return _forgetting_decoding(query_BHK, key_BSGK, value_BSGK, log_forget_BH, bias_BSH, position, splits)


def flash_decoding(
    query_BHK: Tensor,
    key_BSGK: Tensor,
    value_BSGK: Tensor,
    position: Tensor,
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of H query heads, one position each, over a cache of G key/value heads, each shared by H / G; (B, H,
    K), without gradient.

    Args:
        key_BSGK: room for S positions; positions after `position` are not read.
        position: of the query and its own key: an int64 scalar on the device.
        window: number of visible positions, its own included.
        splits: parts of the cache; None for `splits_for`.
    """
    if window is not None and window < 1:
        raise ValueError(f"a window of {window}: must be at least 1")
    splits = _number_of_splits(splits, window, query_BHK, key_BSGK)
    return _flash_decoding(query_BHK, key_BSGK, value_BSGK, position, window or 0, splits)


def _number_of_splits(splits: int | None, window: int | None, query: Tensor, key: Tensor) -> int:
    B, S, G, K = key.shape
    if splits is None:
        keys = tiles_for(query.dtype, K).keys
        return splits_for(min(S, window or S), B * G, num_multiprocessors(query.device), keys)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits: must be 1 to {MAX_SPLITS}")
    return splits
