"""Projection to logits and cross-entropy as one operator that never holds all logits.

For some rows at a time, a kernel computes the loss in float32 and replaces the logits by their gradient; two products
give the gradients of both factors, which the backward pass only scales (as in Liger Kernel, Hsu et al., 2024).
"""

# pyright: reportArgumentType=false

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import custom_op, gradient_of
from attnbench.ops.common.triton.launching import launch

PART_BYTES = 2**25
"""Logits at a time: few enough for the cache of a large GPU, many enough to fill the GPU."""

MAX_BLOCK = 4096
"""Logits of a row that a program holds at a time."""

SHORT_ROWS = 1024
"""Logits of a program's rows, where these are of at most 32 logits."""

MAX_PARTS, FEW_SYMBOLS = 16, 128
"""Most parts of the sums of the weights' gradients, and most symbols for which these are summed in parts."""


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, label_weight_N: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum over rows n of label_weight_n × -log softmax(weight x_n)[target_n], in nats, a float32 scalar, and
    the gradients to be scaled: (N, D) in x's dtype and (V, D) float32; both empty unless `with_gradient`.

    Args:
        x_ND: in the compute dtype, to which the weight is rounded.
        label_weight_N: float32; None for 1.
    """
    label_weight = label_weight_N[None] if label_weight_N is not None else None
    results = _of_models(x_ND[None], weight_VD[None], targets_N[None], label_weight, with_gradient)
    total, of_x, of_weight = (result.squeeze(0) for result in results)
    return total, of_x, of_weight


def _empty_gradients(x_MND: Tensor, weight_MVD: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    num_models = x_MND.shape[0]
    shapes = (x_MND.shape, weight_MVD.shape) if with_gradient else ((num_models, 0), (num_models, 0))
    return x_MND.new_empty(shapes[0]), weight_MVD.new_empty(shapes[1], dtype=torch.float32)


def _outputs(
    x: Tensor, weight: Tensor, targets: Any, label_weight: Any, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.float32), *_empty_gradients(x, weight, with_gradient)


@custom_op("linear_cross_entropy", _outputs)
def _of_models(
    x_MND: Tensor, weight_MVD: Tensor, targets_MN: Tensor, label_weight_MN: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_cross_entropy` of as many of M models at a time as have logits that fit in the cache, or of parts of one
    model's rows."""
    (num_models, num_rows, _), num_symbols = x_MND.shape, weight_MVD.shape[1]
    # Padded by zeros to a multiple of 16 bytes, for fast matrix products.
    weight_MVD = torch.nn.functional.pad(weight_MVD.to(x_MND.dtype), (0, 0, 0, -num_symbols % 8))
    nats_MN = torch.empty(num_models, num_rows, dtype=torch.float32, device=x_MND.device)
    of_x, of_weight = _empty_gradients(x_MND, weight_MVD[:, :num_symbols], with_gradient)
    at_once = PART_BYTES // (weight_MVD.shape[1] * weight_MVD.element_size())
    models_at_once, rows_at_once = max(1, at_once // num_rows), max(1, at_once)
    for model, row in itertools.product(range(0, num_models, models_at_once), range(0, num_rows, rows_at_once)):
        part = slice(model, model + models_at_once), slice(row, row + rows_at_once)
        x, weight = x_MND[part], weight_MVD[part[0]]
        # A stack of one is a matrix, which uses other kernels.
        x, weight = (x[0], weight[0]) if len(x) == 1 else (x, weight)
        logits = x @ weight.mT
        label_weight = label_weight_MN[part] if label_weight_MN is not None else None
        nats_MN[part] = _take_loss(logits, targets_MN[part], label_weight, num_symbols, with_gradient)
        if with_gradient:
            torch.matmul(logits, weight, out=of_x[part].view_as(x))
            # In parts: cuBLAS splits a sum over rows for one matrix, but not for several.
            parts = math.gcd(x.shape[-2], MAX_PARTS) if x.dim() == 3 and num_symbols <= FEW_SYMBOLS else 1
            logits, x = (tensor.unflatten(-2, (parts, -1)) for tensor in (logits, x))
            of_part = (logits.mT @ x).sum(-3, dtype=of_weight.dtype)[..., :num_symbols, :]
            if row == 0:
                of_weight[part[0]] = of_part
            else:
                of_weight[part[0]] += of_part
    return nats_MN.sum(1), of_x, of_weight


def _take_loss(
    logits: Tensor, targets_MN: Tensor, label_weight_MN: Tensor | None, num_symbols: int, with_gradient: bool
) -> Tensor:
    """Return the nats of each row of logits (..., V), (M, N); with gradient, overwrite the logits by it."""
    rows = logits.view(-1, logits.shape[-1])
    block = min(MAX_BLOCK, triton.next_power_of_2(rows.shape[1]))
    # Of few symbols a program takes several rows, two or more of a warp.
    rows_of_program = SHORT_ROWS // block if block <= 32 else 1
    nats_MN = torch.empty(targets_MN.shape, dtype=torch.float32, device=logits.device)
    launch(
        _loss_and_gradient, (-(-len(rows) // rows_of_program),), rows, targets_MN.contiguous(),
        nats_MN if label_weight_MN is None else label_weight_MN.contiguous(), nats_MN, len(rows), num_symbols,
        rows.shape[1], IS_WEIGHTED=label_weight_MN is not None, WITH_GRADIENT=with_gradient, BLOCK=block,
        ROWS=rows_of_program,
    )  # fmt: skip
    return nats_MN


@gradient_of(_of_models, unsaved=(0, 1, 2, 3), keeps=slice(1, None), constant=slice(1, None))
def _gradient(ctx: Any, total_gradient_M: Tensor, *_: None) -> tuple[Tensor, Tensor]:
    of_x, of_weight = ctx.saved_tensors
    gradient_M11 = total_gradient_M[:, None, None]
    # The scale is float32, and the product would be.
    return torch.mul(of_x, gradient_M11, out=torch.empty_like(of_x)), of_weight * gradient_M11


@triton.jit
def _loss_and_gradient(
    logits, targets, label_weights, nats, num_rows, num_symbols, stride,
    IS_WEIGHTED: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient overwrites the logits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    row_logits = logits + row[:, None] * stride
    column = tl.arange(0, BLOCK)[None, :]
    highest = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_symbols, BLOCK):
        there = (start + column < num_symbols) & exists[:, None]
        highest = tl.maximum(
            highest, tl.load(row_logits + start + column, mask=there, other=float("-inf")).to(tl.float32)
        )
    peak = tl.max(highest, 1)
    odds = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, num_symbols, BLOCK):
        there = (start + column < num_symbols) & exists[:, None]
        given = tl.load(row_logits + start + column, mask=there, other=float("-inf")).to(tl.float32)
        odds += tl.exp(given - peak[:, None])
    total = tl.sum(odds, 1)
    target = tl.load(targets + row, mask=exists, other=0)
    weight = tl.full([ROWS], 1.0, tl.float32)
    if IS_WEIGHTED:
        weight = tl.load(label_weights + row, mask=exists, other=0.0)
    of_target = tl.load(logits + row * stride + target, mask=exists, other=0.0).to(tl.float32)
    tl.store(nats + row, weight * (tl.log(total) + peak - of_target), mask=exists)
    if WITH_GRADIENT:
        # Every thread must have read the target's logit before it is overwritten.
        tl.debug_barrier()
        for start in range(0, stride, BLOCK):
            index = start + column
            there = (index < num_symbols) & exists[:, None]
            given = tl.load(row_logits + index, mask=there, other=float("-inf")).to(tl.float32)
            odds = tl.exp(given - peak[:, None]) / total[:, None]
            gradient = weight[:, None] * (odds - tl.where(index == target[:, None], 1.0, 0.0))
            # Padding has no gradient.
            tl.store(row_logits + index, tl.where(there, gradient, 0.0), mask=(index < stride) & exists[:, None])
