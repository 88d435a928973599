"""Mixers with a kernel that is wrong, for what has to notice."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.mixers.linear import LinearAttention
from attnbench.mixers.softmax import Softmax


class LosesTheTail(torch.autograd.Function):
    """The identity, whose gradient is 0 in the positions behind the last whole chunk."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, chunk: int) -> Tensor:
        ctx.chunk = chunk
        return x_BTHK.clone()

    @staticmethod
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = gradient_BTHK.shape[1] // ctx.chunk * ctx.chunk
        return torch.cat([gradient_BTHK[:, :whole], 0 * gradient_BTHK[:, whole:]], 1), None


def lose_the_tail(tensors: tuple[Tensor, ...], part: int, chunk: int = 64) -> list[Tensor]:
    """The same tensors, one of which has a wrong gradient."""
    return [LosesTheTail.apply(tensor, chunk) if index == part else tensor for index, tensor in enumerate(tensors)]  # pyright: ignore[reportReturnType]


class BrokenSoftmax(Softmax):
    """Softmax whose fast form is wrong in one gradient: of query (0), key (1) or value (2)."""

    part: ClassVar[int] = 1

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        return super().mix(*lose_the_tail((query_BTHK, key_BSHK, value_BSHK), self.part))


class BrokenLinear(LinearAttention):
    """The same of linear attention."""

    backends: ClassVar[tuple[str, ...]] = ("torch",)
    part: ClassVar[int] = 1

    def mix(self, inputs: Any, memory: Any) -> Any:
        return super().mix((*lose_the_tail(inputs[:3], self.part), *inputs[3:]), memory)


class HalfBroken(LinearAttention):
    """`torch` is right, and what `auto` takes; the other backend raises, or gives what is not a number."""

    backends: ClassVar[tuple[str, ...]] = ("torch", "nan", "raises")

    def mix(self, inputs: Any, memory: Any) -> Any:
        if self.backend == "raises":
            raise RuntimeError("no such kernel\nand a second line")
        mixed_BTHV, last = super().mix(inputs, memory)
        return mixed_BTHV * torch.nan if self.backend == "nan" else mixed_BTHV, last
