"""mLSTM: a matrix memory written by an exponential gate, forgotten by another, and read through a normaliser."""

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
    """Memory of the past, all of it times exp(-maximum); its size does not depend on the length."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    maximum_BH: Tensor
    """Running maximum of the gates' logarithms, see ops/scalar/mlstm.py."""
    history_BWC: Tensor
    position: Tensor


class MLSTM(RecurrentMixer):
    """mLSTM (Beck et al., 2024; arXiv 2405.04517), per head, with S_0 = 0 and n_0 = 0:

        S_t = a_t S_{t-1} + k_t (i_t v_t)^T,   n_t = a_t n_{t-1} + i_t k_t,   y_t = S_t^T q_t / max(|n_t . q_t|, 1)

    a_t = sigmoid(-decay(x_t) - decay_bias), the paper's f, not below exp(-MAX_FORGETTING), and i_t = exp(write(x_t)).
    q, k and v come through a short convolution and SiLU, and q is divided by sqrt(K). All is computed around a running
    maximum of the gates' logarithms. Rotary positions turn q and k in the normaliser too, of which the absolute value
    is taken.

    The paper: sigmoid or exponential f, biases of f from 3 to 6 over the heads, a convolution of 4 taps and SiLU before
    query and key, a norm a head, a sigmoid gate of the output. Ours has the sigmoid f, and differs in this: the
    convolution and SiLU come after the projection, and over the value too; the norm is an RMS norm; there is no
    bias of query, key, value and i, which for i would multiply S and n alike and be undone by the norm; no skip around
    the memory; and the block is that of all mixers here, with its feed-forward, instead of one that expands by 2. V =
    2K is xLSTM 7B's (arXiv 2503.13427).
    """

    operator, state_class, decays = MLSTM_RECURRENCE, MLSTMState, True
    activation = True
    value_expansion, conv_size, output_norm, output_gate = 2, 4, True, "sigmoid"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: biases of 3 to 6, half-lives of 14 to 280")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

    @classmethod
    def kernel_widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        # Of the value any, as the normaliser's column is filled up to 16.
        return options["head_width"], 16

    def add_parts(self) -> None:
        self.decay, self.write = Projection(self.dim, self.heads), Projection(self.dim, self.heads)
        self.decay_bias = nn.Parameter(torch.empty(self.heads))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        spread = inverse_softplus(spread_steps(self.heads))
        self.decay_bias.copy_(spread if self.decay_init == "spread" else -torch.linspace(3, 6, self.heads))

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of f and i."""
        forgetting_BTH = F.softplus(at_least_float32(self.decay(x_BTD)) + self.decay_bias)
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), at_least_float32(self.write(x_BTD))
