"""Launches of the gated delta rule's kernels in both forms, forward and backward."""

# pyright: reportArgumentType=false

import torch
from torch import Tensor

from attnbench.ops.common.triton.launching import launch
from attnbench.ops.delta.triton.delta_choice import DeltaRule
from attnbench.ops.delta.triton.delta_gradient import NARROW_KEYS, gradient_kernel, wide_gradient_kernel
from attnbench.ops.delta.triton.delta_parallel import (
    key_parts_kernel,
    prepare_backward_kernel,
    prepare_forward_kernel,
    read_kernel,
    scan_backward_kernel,
    scan_forward_kernel,
)
from attnbench.ops.delta.triton.delta_tiles import FACTORS, pairs_kernel
from attnbench.ops.delta.triton.delta_walk import walk_backward_kernel, walk_forward_kernel

Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tensors per chunk for the gradient: S (transposed), F, and the two outputs of `pairs_kernel`."""


def forward(rule: DeltaRule, initial: Tensor | None, output: Tensor, last: Tensor | None, kept: Kept | None) -> None:
    pairs, factors = kept[2:] if kept is not None else _empty_pairs(rule)
    launch(
        pairs_kernel, (rule.all_chunks,),
        rule.mixed, rule.log_decay, rule.beta, pairs, factors, rule.length, rule.scale,
        **rule.options("pairs", **rule.heads, UNIT=rule.unit_length),
    )  # fmt: skip
    prepared, heads = (rule.mixed, pairs, factors), rule.heads
    if not rule.goes_parallel():
        states, corrections = (None, None) if kept is None else kept[:2]
        launch(
            walk_forward_kernel, (rule.sequences, rule.num_blocks("walk_forward")),
            *prepared, initial, output, last, states, corrections, rule.length,
            **rule.options("walk_forward", **heads),
        )  # fmt: skip
        return
    states, corrections = _empty_states(rule) if kept is None else kept[:2]
    readers, writers = _key_parts(rule, pairs, factors)
    launch(
        prepare_forward_kernel, (rule.all_chunks, rule.num_blocks("prepare_forward")),
        *prepared, corrections, rule.length, **rule.options("prepare_forward", **heads),
    )  # fmt: skip
    launch(
        scan_forward_kernel, (rule.sequences, rule.num_blocks("scan_forward")),
        factors, readers, writers, initial, last, states, corrections, rule.length,
        **rule.options("scan_forward"),
    )  # fmt: skip
    launch(
        read_kernel, (rule.all_chunks, rule.num_blocks("read")),
        *prepared, states, corrections, output, rule.length, **rule.options("read", **heads),
    )  # fmt: skip


def backward(
    rule: DeltaRule, kept: Kept, gradient: Tensor, last_gradient: Tensor | None, of_initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    states, corrections, pairs, factors = kept
    of_states, of_corrections = torch.empty_like(states), torch.empty_like(corrections)
    prepared, ends = (rule.mixed, pairs, factors), (last_gradient, of_initial)
    heads = rule.heads
    if rule.goes_parallel():
        readers, writers = _key_parts(rule, pairs, factors)
        launch(
            prepare_backward_kernel, (rule.all_chunks, rule.num_blocks("prepare_backward")),
            *prepared, gradient, of_corrections, of_states, rule.length,
            **rule.options("prepare_backward", **heads),
        )  # fmt: skip
        launch(
            scan_backward_kernel, (rule.sequences, rule.num_blocks("scan_backward")),
            factors, readers, writers, *ends, of_states, of_corrections, rule.length,
            **rule.options("scan_backward"),
        )  # fmt: skip
    else:
        launch(
            walk_backward_kernel, (rule.sequences, rule.num_blocks("walk_backward")),
            *prepared, gradient, *ends, of_states, of_corrections, rule.length,
            **rule.options("walk_backward", **heads),
        )  # fmt: skip
    of_mixed, of_log_decay, of_beta = (torch.empty_like(x) for x in (rule.mixed, rule.log_decay, rule.beta))
    of_heads = None
    if rule.num_key_heads < rule.num_heads:
        of_heads = of_mixed.new_empty(
            *of_mixed.shape[:2], 2, rule.num_key_heads, rule.num_heads // rule.num_key_heads, rule.key_width
        )
    launch(
        gradient_kernel if rule.key_width <= NARROW_KEYS else wide_gradient_kernel, (rule.all_chunks,),
        rule.mixed, rule.log_decay, pairs, factors, states, corrections, gradient, of_states, of_corrections,
        of_mixed, of_heads, of_log_decay, of_beta, rule.length, rule.scale,
        **rule.options("gradient", UNIT=rule.unit_length, CORRECTED=not rule.goes_parallel(), **heads),
    )  # fmt: skip
    if of_heads is not None:
        of_pair = of_mixed[..., : 2 * rule.num_key_heads * rule.key_width]
        torch.sum(of_heads, 4, out=of_pair.unflatten(-1, (2, rule.num_key_heads, -1)))
    return of_mixed, of_log_decay, of_beta


def _key_parts(rule: DeltaRule, pairs: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    readers, writers = (rule.empty(rule.chunk, rule.key_width) for _ in range(2))
    launch(
        key_parts_kernel, (rule.all_chunks,),
        rule.mixed, pairs, factors, readers, writers, rule.length,
        **rule.options("key_parts", **rule.heads),
    )  # fmt: skip
    return readers, writers


def _empty_states(rule: DeltaRule) -> tuple[Tensor, Tensor]:
    return rule.empty(rule.value_width, rule.key_width), rule.empty(rule.chunk, rule.value_width)


def _empty_pairs(rule: DeltaRule) -> tuple[Tensor, Tensor]:
    factors = rule.log_decay.new_empty(rule.sequences, rule.num_chunks, FACTORS.value, rule.chunk)
    return rule.empty(2, rule.chunk, rule.chunk), factors
