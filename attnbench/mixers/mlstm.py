"""mLSTM: a matrix memory with an exponential input gate, a forget gate and a normaliser."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.layers import Projection
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.mlstm import MLSTM_RECURRENCE
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING
from attnbench.settings.options import option


class MLSTMState(NamedTuple):
    """Memory and normaliser are those of the past times exp(-maximum)."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    maximum_BH: Tensor
    """Running maximum of the gates' logarithms, see ops/scalar/mlstm.py."""
    history_BWC: Tensor
    position: Tensor


class MLSTM(RecurrentMixer):
    """mLSTM (Beck et al., 2024; arXiv 2405.04517), per head, with S_0 = 0 and n_0 = 0:

        S_t = a_t S_{t-1} + k_t (i_t v_t)^T,   n_t = a_t n_{t-1} + i_t k_t,   y_t = S_t^T q_t / max(|n_t . q_t|, 1)

    a_t = sigmoid(-decay(x_t) - decay_bias), the paper's f, at least exp(-MAX_FORGETTING), and i_t = exp(write(x_t)). q,
    k and v come through a short convolution and SiLU, and q is divided by sqrt(K). Rotary positions turn q and k in the
    normaliser too.

    The paper has the convolution and SiLU before the projection to query and key, biases of query, key, value and i, a
    skip around the memory, and a block that expands by 2 without a feed-forward. V = 2K is xLSTM 7B's (arXiv
    2503.13427).
    """

    operator, state_class, decays = MLSTM_RECURRENCE, MLSTMState, True
    activation = True
    value_expansion, conv_size, output_norm, output_gate = 2, 4, True, "sigmoid"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: biases of 3 to 6, half-lives of 14 to 280")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

    @classmethod
    def kernel_widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        # Any value width: the normaliser's column is padded to 16.
        return options["head_width"], 16

    def add_parts(self) -> None:
        self.decay, self.write = Projection(self.dim, self.heads), Projection(self.dim, self.heads)
        self.decay_bias = nn.Parameter(torch.empty(self.heads))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        spread = inverse_softplus(spread_steps(self.heads))
        self.decay_bias.copy_(spread if self.decay_init == "spread" else -torch.linspace(3, 6, self.heads))

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        forgetting_BTH = F.softplus(at_least_float32(self.decay(x_BTD)) + self.decay_bias)
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), at_least_float32(self.write(x_BTD))
