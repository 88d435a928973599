"""Linear layers of stacked trainings, whose weight gradients are summed in parts.

A weight gradient is a sum over all tokens of a batch with few results. cuBLAS splits such a sum over the GPU for one
matrix but not for a batch of matrices: eight of them took half of a step on an H200.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST_ROWS = 512


class SplitSums(TorchFunctionMode):
    """Inside it, and inside vmap over weights, `F.linear` without a bias sums its weight gradient in parts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and all(bias is None for bias in args[2:]):
            x, weight = args[:2]
            if torch.is_autocast_enabled(x.device.type):
                # Outside the function, because its backward pass runs without autocast.
                x = x.to(torch.get_autocast_dtype(x.device.type))
            return _Linear.apply(x, weight, weight.detach().to(x.dtype))
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """x_R...D and weight_RED to x weight^T, (R, ..., E); called within vmap, which adds the R. `rounded_RED` is the
    weight in x's dtype. The weight's gradient has the weight's own dtype: a cast would be a launch."""

    @staticmethod
    def forward(x: Tensor, weight_RED: Tensor, rounded_RED: Tensor) -> Tensor:
        return (_rows(x) @ rounded_RED.mT).view(*x.shape[:-1], rounded_RED.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_RED = ctx.saved_tensors
        x_RND, gradient_RNE = _rows(x), _rows(gradient)
        of_x = (gradient_RNE @ weight_RED).view_as(x)
        parts = num_parts(x_RND.shape[1])
        sums = [tensor.unflatten(1, (parts, -1)).flatten(0, 1) for tensor in (gradient_RNE, x_RND)]
        of_weight = (sums[0].mT @ sums[1]).unflatten(0, (-1, parts)).sum(1, dtype=ctx.dtype)
        return of_x, of_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> tuple[Tensor, int]:
        stacked = [
            x.movedim(axis, 0) if axis is not None else x.expand(info.batch_size, *x.shape)
            for x, axis in zip(tensors, in_dims, strict=True)
        ]
        return _Linear.apply(*stacked), 0


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def num_parts(num_rows: int) -> int:
    """Return the parts, a power of two, of a sum over this many rows."""
    parts = 1
    while num_rows % (2 * parts) == 0 and num_rows // (2 * parts) >= LEAST_ROWS:
        parts *= 2
    return parts
