"""The projection to logits and the cross-entropy over them as one operator, in which no batch of logits ever stands.

A part of the rows at a time: its logits, in the compute dtype, stay in the cache while one kernel takes the loss from
them in float32 and writes the gradient in their place, from which two products give the gradients of both factors.
The backward pass only scales those. (Computing the gradient with the loss: as in Liger Kernel, Hsu et al., 2024.)
"""

# Launching a kernel gives plain numbers for its constexpr arguments.
# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.kernels.launching import launch, register_fake

PART_BYTES = 2**25
"""Number of logits at once: they fit into the cache of a large GPU, and their products still fill it."""

MAX_BLOCK = 4096
"""Logits of a row that a program holds at once."""


@torch.library.custom_op("attnbench::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, label_weight_N: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over rows n of label_weight_n × -log softmax(weight x_n)[target_n], in nats.

    Args:
        x_ND: in the compute dtype, to which the weight is rounded.
        label_weight_N: float32; None: 1 for every row.
        with_gradient: compute the gradients too.

    Returns:
        the sum, a float32 scalar, and what to scale by its gradient: (N, D) in x's dtype and (V, D) float32; both
        empty unless they were asked for.
    """
    num_rows, num_symbols = x_ND.shape[0], weight_VD.shape[0]
    # Rows that are no multiple of 16 bytes long keep a GPU from its fast matrix products, so zeros fill them up.
    weight = torch.nn.functional.pad(weight_VD.to(x_ND.dtype), (0, 0, 0, -num_symbols % 8))
    nats_N = torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    of_x, of_weight = _empty_gradients(x_ND, weight_VD, with_gradient)
    size = max(1, PART_BYTES // (weight.shape[0] * weight.element_size()))
    for start in range(0, num_rows, size):
        part = slice(start, start + size)
        logits = x_ND[part] @ weight.T
        launch(
            _loss_and_gradient,
            (logits.shape[0],),
            logits,
            targets_N[part],
            nats_N[part] if label_weight_N is None else label_weight_N[part],
            nats_N[part],
            num_symbols,
            logits.shape[1],
            IS_WEIGHTED=label_weight_N is not None,
            WITH_GRADIENT=with_gradient,
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(logits.shape[1])),
        )
        if with_gradient:
            torch.mm(logits, weight, out=of_x[part])
            of_part = (logits.T @ x_ND[part])[:num_symbols].to(of_weight.dtype)
            of_weight = of_part if start == 0 else of_weight.add_(of_part)
    return nats_N.sum(), of_x, of_weight.contiguous()


def _empty_gradients(x_ND: Tensor, weight_VD: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    shapes = (x_ND.shape, weight_VD.shape) if with_gradient else ((0,), (0,))
    return x_ND.new_empty(shapes[0]), weight_VD.new_empty(shapes[1], dtype=torch.float32)


@register_fake(linear_cross_entropy)
def _(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, label_weight_N: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty((), dtype=torch.float32, device=x_ND.device)
    return total, *_empty_gradients(x_ND, weight_VD, with_gradient)


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, total_gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    of_x, of_weight = ctx.saved_tensors
    return (
        (of_x * total_gradient).to(of_x.dtype),
        (of_weight * total_gradient).to(ctx.weight_dtype),
        None,
        None,
        None,
    )


linear_cross_entropy.register_autograd(_gradient, setup_context=_save_for_gradient)


@linear_cross_entropy.register_vmap
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_weight: Tensor | None,
    with_gradient: bool,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One model after the other: each has a weight of its own, and its products alone fill the device."""

    def of(tensor: Any, axis: int | None, model: int) -> Any:
        return tensor if axis is None else tensor.select(axis, model)

    results = [
        linear_cross_entropy(
            of(x, in_dims[0], model),
            of(weight, in_dims[1], model),
            of(targets, in_dims[2], model),
            of(label_weight, in_dims[3], model),
            with_gradient,
        )
        for model in range(info.batch_size)
    ]
    return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0, 0, 0)


@triton.jit
def _loss_and_gradient(
    logits,
    targets,
    label_weights,
    nats,
    num_symbols,
    stride,
    IS_WEIGHTED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute, a program a row, its loss and the gradient of its logits in their place."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_symbols, BLOCK):
        there = start + column < num_symbols
        highest = tl.maximum(
            highest, tl.load(row_logits + start + column, mask=there, other=float("-inf")).to(tl.float32)
        )
    peak = tl.max(highest, 0)
    odds = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_symbols, BLOCK):
        there = start + column < num_symbols
        odds += tl.exp(tl.load(row_logits + start + column, mask=there, other=float("-inf")).to(tl.float32) - peak)
    total = tl.sum(odds, 0)
    target = tl.load(targets + row)
    weight = 1.0
    if IS_WEIGHTED:
        weight = tl.load(label_weights + row)
    of_target = tl.load(row_logits + target).to(tl.float32)
    tl.store(nats + row, weight * (tl.log(total) + peak - of_target))
    if WITH_GRADIENT:
        # Every thread must have read the target's logit before one overwrites it.
        tl.debug_barrier()
        for start in range(0, stride, BLOCK):
            index = start + column
            there = index < num_symbols
            odds = tl.exp(tl.load(row_logits + index, mask=there, other=float("-inf")).to(tl.float32) - peak)
            gradient = weight * (odds / total - tl.where(index == target, 1.0, 0.0))
            # What fills the row up has no part in the gradient.
            tl.store(row_logits + index, tl.where(there, gradient, 0.0), mask=index < stride)
