"""Gated linear attention: a sum of keys times values that every key channel forgets at its own pace."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import by_heads
from attnbench.mixers.decay import DECAY_INIT, DecayInit, spread_steps
from attnbench.mixers.layers import LowRank
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY
from attnbench.settings.options import option

TEMPER = 16
"""Root of the gate: a half-open gate halves the memory in as many positions."""


class GatedLinearAttention(RecurrentMixer):
    """Gated linear attention (Yang, Wang, Shen, Panda and Kim, 2024; arXiv 2312.06635), per head, with S_0 = 0:

        S_t = Diag(a_t) S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)

    a_t = sigmoid(decay(x_t) + decay_bias)^(1/16), decay of low rank; k and v straight from the projection.

    The paper has V = 2K = dim / heads and a bias in its output gate.
    """

    operator, decays = DIAGONAL_DECAY, True
    output_norm, output_gate = True, "silu"
    decay_rank: int = option(16, "rank of the map to the decay")
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} channels | paper: of 16 positions")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})
    paper_options: ClassVar[dict[str, Any]] = {"value_expansion": 2}

    def add_parts(self) -> None:
        self.move_last("query_norm", "key_norm")
        self.decay = LowRank(self.dim, self.decay_rank, self.heads * self.key_width, setting="decay_rank")
        self.decay_bias = nn.Parameter(torch.empty(self.heads * self.key_width))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        self.decay_bias.zero_()
        if self.decay_init == "spread":
            # -log sigmoid(x) = 16 step where x = -log(exp(16 step) - 1).
            self.decay_bias.copy_(-(TEMPER * spread_steps(self.decay_bias.numel())).expm1().log())

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        hidden_BTC = self.decay(x_BTD).to(accumulation_dtype(x_BTD.dtype)) + self.decay_bias
        return (self.in_pairs(by_heads((F.logsigmoid(hidden_BTC) / TEMPER,), self.key_width)[0]),)
