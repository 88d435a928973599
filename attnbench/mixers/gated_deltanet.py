"""Gated DeltaNet: a memory that decays, and in which each key overwrites its former value."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, init_decay, softplus_decay
from attnbench.mixers.deltanet import DeltaNet
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.options import option


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025; arXiv 2412.06464), per head, with M_0 = 0:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    q, k and v come through a short convolution and SiLU; b_t = sigmoid(beta(x_t)); a_t = exp(-exp(log_decay_rate)
    softplus(decay(x_t) + decay_bias)), at least exp(-MAX_FORGETTING).

    With the paper's `decay_init` it is luck whether a model of one head remembers the beginning of a sequence.
    """

    decays = True
    output_gate = "silu"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: drawn as in Mamba-2")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})
    paper_options: ClassVar[dict[str, Any]] = {"value_expansion": 2}

    def add_parts(self) -> None:
        self.decay = Projection(self.dim, self.heads)
        self.log_decay_rate, self.decay_bias = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        super().add_parts()

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        init_decay(self.log_decay_rate, self.decay_bias, self.decay_init, generator)

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        dtype = accumulation_dtype(x_BTD.dtype)
        decay_BTH, beta_BTH = (part.to(dtype) for part in self._decay_and_beta(x_BTD))
        log_decay_BTH = softplus_decay(decay_BTH, self.log_decay_rate, self.decay_bias)
        return log_decay_BTH, self.max_beta * beta_BTH.sigmoid()

    def _decay_and_beta(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        if x_BTD.shape[1] == 1:
            # As in FeedForward, autocast caches the casts of two separate weights.
            return self.decay(x_BTD), self.beta(x_BTD)
        # One product: each alone is too narrow for a GPU's matrix units.
        both_BTC = F.linear(x_BTD, torch.cat([self.decay.weight, self.beta.weight]))
        return both_BTC.tensor_split((self.heads,), dim=-1)
