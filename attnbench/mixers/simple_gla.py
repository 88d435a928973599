"""Simple gated linear attention: a memory that every head forgets as fast as the input says."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.layers import Projection
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING, SCALAR_DECAY
from attnbench.settings.options import option

SOFTENING = 16
"""Root of the gate: a half-open gate keeps the memory for tens of positions."""


class SimpleGLA(RecurrentMixer):
    """Gated linear attention (Yang et al., 2024; arXiv 2312.06635) with one gate a head, the gated retention of Sun et
    al. (2024; arXiv 2405.05254); per head, with S_0 = 0:

        S_t = a_t S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),   a_t = sigmoid(-decay(x_t) - decay_bias)^(1/16)

    q, k and v come through a short convolution and SiLU. a_t is at least exp(-MAX_FORGETTING).

    The papers have V = K or 2K and no bias of a_t. The convolution is flash-linear-attention's; rotary positions, which
    gated retention has, are off.
    """

    operator, decays = SCALAR_DECAY, True
    activation = True
    conv_size, output_norm, output_gate = 4, True, "silu"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: of 16 positions")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

    def add_parts(self) -> None:
        self.decay = Projection(self.dim, self.heads)
        self.decay_bias = nn.Parameter(torch.empty(self.heads))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        if self.decay_init == "spread":
            self.decay_bias.copy_(inverse_softplus(SOFTENING * spread_steps(self.heads)))
        else:
            self.decay_bias.zero_()

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        forgetting_BTH = F.softplus(at_least_float32(self.decay(x_BTD)) + self.decay_bias) / SOFTENING
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), None
