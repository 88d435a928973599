"""Launch of the kernels of flash_op.py: tiles, splits, and rotation of keys."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.ops.attention.triton.flash_kernels import (
    flash_forward_kernel,
    flash_key_value_gradient_kernel,
    flash_query_gradient_kernel,
)
from attnbench.ops.attention.triton.flash_parts import (
    add_up_kernel,
    combine_kernel,
    of_parts,
    rows_of_parts,
    splits_for,
)
from attnbench.ops.common.triton.launching import is_roomy, launch, num_multiprocessors
from attnbench.ops.common.triton.products import float32_product
from attnbench.ops.layers.triton.rotary_kernels import padded_width, rotated

ROTATED_INSIDE_UP_TO = 512
"""Longest sequence whose keys the kernels rotate themselves, once per block of queries. Beyond it a separate rotation
pass is faster."""

REGISTERS = {("forward", "forgets"): 128, ("query_gradient", "forgets"): 168, ("forward", "rotates"): 168}
"""Register limits per thread for 64 × 64 tiles with forget gates or rotation inside, so that one more program fits on a
multiprocessor without spilling. Triton 3.6 and 3.7.1 would take 164 (forward) and 197 (gradient) above 512 positions,
and 190 and 150 with rotation."""


class Tiles(NamedTuple):
    """Launch of a kernel; changes results by rounding only."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(kernel: str, dtype: torch.dtype, width: int, length: int, roomy: bool) -> Tiles:
    """Choose tiles by timings on an H200. `length` counts keys; without `roomy` wide heads must fit into 99 KiB."""
    if dtype == torch.float32:
        # Three TF32 products per float32 product need twice the registers.
        if width > 64:
            return Tiles(32, 32, 8, 2 if roomy or kernel == "forward" else 1)
        return Tiles(32, 32, 4, 2) if kernel == "key_value_gradient" else Tiles(64, 32, 4, 2)
    if width > 64:
        if kernel == "forward":
            if not roomy:
                return Tiles(128, 64, 8, 2)
            return Tiles(128, 128, 8, 3) if length > 1024 else Tiles(128, 64, 8, 3)
        # Four warps multiply 64 rows at once; eight warps on 64 rows take 1.5 times as long.
        large = roomy and kernel == "query_gradient" and length > 512
        return Tiles(128, 64, 8, 3) if large else Tiles(64, 64, 4, 2)
    if kernel == "forward":
        return Tiles(128, 64, 4, 3) if length > 512 else Tiles(64, 64, 4, 2)
    if kernel == "query_gradient":
        return Tiles(64, 64, 4, 2) if length > 512 else Tiles(64, 64, 4, 1)
    return Tiles(64, 64, 4, 3) if length > 1024 else Tiles(64, 64, 4, 1)


def _launch(kernel: Any, grid: tuple[int, int], query: Tensor, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(query):
        launch(kernel, grid, query, *arguments, **constants)


def _with_strides(*tensors: Tensor) -> list[Any]:
    return [part for x in tensors for part in (x, x.stride()[:3])]


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _grid(
    num_programs: int, walked: int, window: int | None, walks: str, constants: dict[str, Any], query: Tensor
) -> tuple[int, int]:
    num_blocks, num_warps = _blocks(min(walked, window or walked), constants[walks]), constants["num_warps"]
    return num_programs, splits_for(num_programs, num_blocks, num_multiprocessors(query.device), num_warps, query.dtype)


def _constants(
    kernel: str, inputs: tuple[Tensor, ...], forgets: bool, rotates: bool, causal: bool, window: int | None
) -> dict[str, Any]:
    (query, key, value), widest = inputs, max(inputs[0].shape[3], inputs[2].shape[3])
    tiles = tiles_for(kernel, query.dtype, widest, key.shape[1], is_roomy(query.device))
    is_small = query.dtype != torch.float32 and widest <= 64 and tiles.queries == 64
    registers = REGISTERS.get((kernel, "rotates" if rotates else "forgets" if forgets else "")) if is_small else None
    heads, groups, width, value_width = query.shape[2], key.shape[2], query.shape[3], value.shape[3]
    sizes = {"HEADS": heads, "SHARED_BY": heads // groups, "WIDTH": width, "PADDED": padded_width(width)}
    sizes |= {"VALUE_WIDTH": value_width, "VALUE_PADDED": padded_width(value_width)}
    sizes |= {"QUERIES": tiles.queries, "KEYS": tiles.keys, "WINDOW": window or 0}
    launch_options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    launch_options |= {"maxnreg": registers} if registers else {}
    return sizes | launch_options | {"FORGETS": forgets, "CAUSAL": causal, "PRECISION": float32_product()}


def forward(
    inputs: tuple[Tensor, Tensor, Tensor],
    rotation: Tensor | None,
    cumulative: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return y, contiguous, and z."""
    query, key, value = inputs
    (B, T, H, K), S = query.shape, key.shape[1]
    mixed = query.new_empty(*query.shape[:3], value.shape[3])
    logsumexp = query.new_empty((B, H, T), dtype=torch.float32)
    ahead = _rotated_ahead(rotation, key)
    rotates_key = rotation is not None and ahead is None
    constants = _constants("forward", inputs, cumulative is not None, rotates_key, causal, window)
    grid = _grid(B * H * _blocks(T, constants["QUERIES"]), S, window, "KEYS", constants, query)
    splits = grid[1]
    parts = (mixed, logsumexp) if splits == 1 else (of_parts(mixed, splits), of_parts(logsumexp, splits))
    _launch(
        flash_forward_kernel,
        grid,
        *_with_strides(query, key if ahead is None else rotated(key, ahead), value),
        *(rotation, cumulative, *parts, T, S, K**-0.5),
        ROTATE_QUERY=rotation is not None,
        ROTATE_KEY=rotates_key,
        SPLIT=splits > 1,
        **constants,
    )
    if splits > 1:
        tile = rows_of_parts(splits, constants, "VALUE_WIDTH", "VALUE_PADDED")
        grid = (B * H * _blocks(T, tile["ROWS"]), 1)
        _launch(combine_kernel, grid, *parts, splits, mixed, logsumexp, T, HEADS=H, **tile)
    return mixed, logsumexp


def _rotated_ahead(rotation: Tensor | None, key: Tensor) -> Tensor | None:
    """Return the rotation if keys must be rotated before the kernel: for single TF32 products, which Triton cannot
    compile with keys rotated inside (docs/kernels.md, "Compiler faults"); if tiles rotated inside exceed the shared
    memory; and for long sequences."""
    is_float32 = key.dtype == torch.float32
    is_single = is_float32 and float32_product() == "tf32"
    is_tight = (is_float32 or key.shape[3] > 64) and not is_roomy(key.device)
    return rotation if is_single or is_tight or key.shape[1] > ROTATED_INSIDE_UP_TO else None


def backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    rotation: Tensor | None,
    cumulative: Tensor | None,
    cumulative_gradient: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int | None,
) -> None:
    """Fill `gradients` of query, key and value before rotation, and with forget gates `cumulative_gradient`,
    contiguous."""
    (query_gradient, key_gradient, value_gradient), (query, key, value) = gradients, inputs
    gradient, own_product = channels_side_by_side(gradient), torch.empty_like(logsumexp)
    (B, T, H, K), (S, G) = query.shape, key.shape[1:3]
    ahead = _rotated_ahead(rotation, key)
    rotate, rotate_repeated = rotation is not None, rotation is not None and ahead is None
    problem = inputs, cumulative is not None, rotate_repeated, causal, window
    of_queries, of_keys = (_constants(kernel, *problem) for kernel in ("query_gradient", "key_value_gradient"))
    query_grid = _grid(B * H * _blocks(T, of_queries["QUERIES"]), S, window, "KEYS", of_queries, query)
    key_grid = _grid(B * G * _blocks(S, of_keys["KEYS"]), T, window, "QUERIES", of_keys, query)
    query_splits, key_splits = query_grid[1], key_grid[1]
    # If one is split, so is the other, perhaps into one part: one kernel adds up all three gradients.
    split = max(query_splits, key_splits) > 1
    if split:
        query_parts = of_parts(query_gradient, query_splits)
        key_parts, value_parts = of_parts(key_gradient, key_splits), of_parts(value_gradient, key_splits)
    else:
        query_parts, key_parts, value_parts = gradients
    row_sum, lost, column_parts = None, None, cumulative_gradient
    if cumulative_gradient is not None:
        row_sum, lost = of_parts(logsumexp, query_splits), torch.empty_like(logsumexp)
        column_parts = of_parts(cumulative_gradient, key_splits) if split else cumulative_gradient
    _launch(
        flash_query_gradient_kernel,
        query_grid,
        *_with_strides(query, key if ahead is None else rotated(key, ahead), value),
        *(rotation, cumulative, mixed, logsumexp, *_with_strides(gradient), own_product, lost, row_sum),
        *(*_with_strides(query_parts), T, S, K**-0.5),
        ROTATE_QUERY=rotate,
        ROTATE_KEY=rotate_repeated,
        SPLIT=split,
        **of_queries,
    )
    _launch(
        flash_key_value_gradient_kernel,
        key_grid,
        *_with_strides(query if ahead is None else rotated(query, ahead), key, value),
        *(rotation, cumulative, logsumexp if lost is None else lost, *_with_strides(gradient), own_product, row_sum),
        *(*_with_strides(key_parts, value_parts), column_parts, T, S, K**-0.5),
        ROTATE_QUERY=rotate_repeated,
        ROTATE_KEY=rotate,
        FORGETS_BY=of_queries["QUERIES"] if cumulative is not None else 0,
        SPLIT=split,
        **of_keys,
    )
    if split:
        widths = "WIDTH", "PADDED", "VALUE_WIDTH", "VALUE_PADDED"
        tile = rows_of_parts(max(query_splits, key_splits), of_keys, *widths)
        _launch(
            add_up_kernel,
            (B * (H + 2 * G) * _blocks(max(T, S), tile["ROWS"]), 1),
            *(query_parts, query_splits, *_with_strides(query_gradient)),
            *(key_parts, value_parts, key_splits, *_with_strides(key_gradient, value_gradient), T, S),
            HEADS=H,
            SHARED_BY=H // G,
            **tile,
        )
        if cumulative_gradient is not None and row_sum is not None and column_parts is not None:
            torch.sum(column_parts.unflatten(0, (key_splits, B)), 0, dtype=torch.float64, out=cumulative_gradient)
            cumulative_gradient[:, :, S - T :] += row_sum.unflatten(0, (query_splits, B)).sum(0)


def channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
