"""Layers shared by mixers and the model."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.machine.device import on_kernels
from attnbench.ops.common.precision import at_least_float32
from attnbench.settings.errors import UserError

INITIAL_DEVIATION = 0.02
"""Standard deviation of a projection's initial weights (GPT-2), unless the model's settings name another."""


class Projection(nn.Linear):
    """A linear map without bias. `residual`: its output is added to the residual stream."""

    def __init__(self, in_features: int, out_features: int, *, residual: bool = False) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.residual = residual

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Normal with INITIAL_DEVIATION, over sqrt(num_branches) for the residual stream (GPT-2)."""
        deviation = INITIAL_DEVIATION / num_branches**0.5 if self.residual else INITIAL_DEVIATION
        nn.init.normal_(self.weight, std=deviation, generator=generator)


class LowRank(nn.Module):
    """A linear map without bias of low rank, up(activation(down(x))). `setting` names the rank in messages."""

    def __init__(
        self,
        in_features: int,
        rank: int,
        out_features: int,
        *,
        setting: str,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise UserError(f"attn.{setting}={rank}: must be at least 1")
        self.down, self.up = Projection(in_features, rank), Projection(rank, out_features)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x)
        return self.up(hidden if self.activation is None else self.activation(hidden))


class RMSNorm(nn.Module):
    """y = weight × x / sqrt(mean(x²) + eps), over the last axis, in float32 at least (Zhang and Sennrich, 2019)."""

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"weight"})

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # Compiled, torch's norm is fused with its neighbours and its trace cached.
        if torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)
        if x.device.type == "cpu":
            return _RMSNormCPU.apply(at_least_float32(x), self.weight, self.eps)[0].to(x.dtype)
        if on_kernels(x):
            from attnbench.ops.layers.triton.rms_norm import rms_norm

            # The kernel rounds the weight: casts of it and of its gradient would be three launches.
            return rms_norm(x.reshape(-1, x.shape[-1]), self.weight[None], self.eps).view(x.shape)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm with a learned gain and bias, in float32 at least (Ba et al., 2016)."""

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(at_least_float32(x), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm in half of torch's time on a CPU.

    With n = x r, r = 1 / sqrt(mean(x²) + eps) and g = dL/dy, row by row:

        dL/dx = r (g w - n mean(g w n)),   dL/dw = sum over rows of g n
    """

    # Under vmap x or w may be shared, so nothing but the new gradient is updated in place.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = (mean_square + eps).rsqrt()
        return x * scale * weight, scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        wide_weight = weight.to(x.dtype)
        # LayerNorm's fused gradient around a mean of zero also subtracts mean(g w), which is added back.
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, torch.zeros_like(scale), scale, wide_weight, None, [True, True, False]
        )
        mean = (gradient @ wide_weight)[..., None] / x.shape[-1]
        return of_x.add_(mean * scale), of_weight.to(weight.dtype), None


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) × up(x)) (Shazeer, 2020)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        # On a CPU two products with contiguous results are faster than one larger product.
        self.gate = Projection(dim, width)
        self.up = Projection(dim, width)
        self.down = Projection(width, dim, residual=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Two in a step too: autocast caches its cast of each weight, but not of both joined.
        if x_BTD.dim() == 2 or not on_kernels(x_BTD):
            return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        from attnbench.ops.layers.triton.swiglu import swiglu

        packed = F.linear(x_BTD, torch.cat([self.gate.weight, self.up.weight]))
        return self.down(swiglu(packed.flatten(0, -2)).unflatten(0, x_BTD.shape[:-1]))


class ShortConvolution(nn.Module):
    """y_t = sum_i weight_i x_(t - size + 1 + i), channel by channel."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        if size < 1:
            raise UserError(f"attn.conv_size={size}: must be positive, or 0 for no convolution")
        self.weight = nn.Parameter(torch.empty(channels, size))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, x_BTC: Tensor, history_BWC: Tensor | None = None, *, activation: bool = False) -> Tensor:
        """Convolve T positions, and apply SiLU with `activation`. `history_BWC`: the size - 1 inputs before the first,
        updated in place; None: zeros."""
        length, taps = x_BTC.shape[1], self.size - 1
        past_BWC = None if history_BWC is None else history_BWC.to(x_BTC.dtype)
        if on_kernels(x_BTC) and 2 <= self.size <= 8:
            from attnbench.ops.layers.triton.short_convolution import short_convolution

            y_BTC = short_convolution(x_BTC, self.weight, past_BWC, activation)
        else:
            y_BTC = self._convolve(x_BTC, past_BWC)
            y_BTC = F.silu(y_BTC) if activation else y_BTC
        if history_BWC is not None and past_BWC is not None:
            last_BWC = torch.cat([past_BWC, x_BTC[:, max(length - taps, 0) :]], dim=1)[:, min(length, taps) :]
            history_BWC.copy_(last_BWC)
        return y_BTC

    def _convolve(self, x_BTC: Tensor, past_BWC: Tensor | None) -> Tensor:
        length, taps = x_BTC.shape[1], self.size - 1
        padded = F.pad(x_BTC, (0, 0, taps, 0)) if past_BWC is None else torch.cat([past_BWC, x_BTC], dim=1)
        weight_CW = self.weight.to(x_BTC.dtype)
        y_BTC = padded[:, :length] * weight_CW[:, 0]
        for tap in range(1, self.size):
            y_BTC = torch.addcmul(y_BTC, padded[:, tap : tap + length], weight_CW[:, tap])
        return y_BTC
