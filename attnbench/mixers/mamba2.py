"""Mamba-2: a state space whose step size the input chooses, in the form of attention with a decay."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, init_decay
from attnbench.mixers.layers import Projection
from attnbench.mixers.state_space import StateSpace
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING, SCALAR_DECAY
from attnbench.settings.options import option


class Mamba2(StateSpace):
    """Mamba-2 (Dao and Gu, 2024; arXiv 2405.21060), per head, with S_0 = 0:

        S_t = a_t S_{t-1} + k_t (d_t v_t)^T,   y_t = S_t^T q_t + skip v_t,   a_t = exp(-exp(log_decay_rate) d_t)

    q, k and v come through a short convolution and SiLU; d_t = softplus(step(x_t) + step_bias). a_t is at least
    exp(-MAX_FORGETTING).

    The paper has N = 128 and no feed-forward in its block (here model.feed_forward_width=0 and more layers); its
    convolution has a bias; it gates before one norm over all heads, here each head is normed before the gate.
    """

    operator, activation = SCALAR_DECAY, True
    conv_size, output_norm, output_gate = 4, True, "silu"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: drawn")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "step_bias", "skip"})

    def add_parts(self) -> None:
        self.step_size = Projection(self.dim, self.heads)
        self.step_bias, self.log_decay_rate = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        self.add_skip()

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        init_decay(self.log_decay_rate, self.step_bias, self.decay_init, generator)
        nn.init.ones_(self.skip)

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        step_BTH = F.softplus(at_least_float32(self.step_size(x_BTD)) + self.step_bias)
        forgetting_BTH = self.log_decay_rate.to(step_BTH.dtype).exp() * step_BTH
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), step_BTH
