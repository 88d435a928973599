"""Decays that a mixer computes from its input, as Mamba-2 does, and their initial values.

    log a_t = -exp(log_rate) softplus(hidden_t + bias), not below -MAX_FORGETTING

The rate is a number a head or channel, hidden_t a projection of the input, and the softplus the time step.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING

DecayInit = Literal["spread", "paper"]
"""Values of `decay_init`: half-lives spread evenly by ratio over the heads or channels, or the paper's."""

DECAY_INIT = "half-lives of 1.7 to 693 positions over the"


def softplus_decay(hidden: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Return log a_t in the dtype of `hidden`, float32 at least; rate and bias broadcast against its last axes."""
    forgetting = log_rate.to(hidden.dtype).exp() * F.softplus(hidden + bias)
    return -forgetting.clamp(max=MAX_FORGETTING)


def spread_steps(number: int, largest: float = 0.4) -> Tensor:
    """Return initial values of -log a_t, 0.001 to `largest` evenly by ratio: half-lives of 693 down to 1.7."""
    return torch.logspace(math.log10(0.001), math.log10(largest), number)


@torch.no_grad()
def init_decay(log_rate: Tensor, bias: Tensor, decay_init: DecayInit, generator: torch.Generator) -> None:
    """Fill the parameters of `softplus_decay`.

    spread: rates of 1 and time steps of 0.001 to 0.4, evenly by ratio over the bias, the slowest first. paper: as in
    Mamba-2 (arXiv 2405.21060) rates drawn evenly from 1..16 and steps, by their logarithms, from 0.001..0.1.
    """
    if decay_init == "spread":
        rate = torch.ones(log_rate.shape)
        step = spread_steps(bias.numel()).view(bias.shape)
    else:
        rate = torch.empty(log_rate.shape).uniform_(1, 16, generator=generator)
        step = 0.001 * 100 ** torch.rand(bias.shape, generator=generator)
    log_rate.copy_(rate.log())
    bias.copy_(inverse_softplus(step))


def inverse_softplus(step: Tensor) -> Tensor:
    """Return log(exp(step) - 1), written so that a small step loses no digits."""
    return step + (-torch.expm1(-step)).log()
