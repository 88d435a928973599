"""DeltaNet: a memory without decay, in which each key overwrites its former value."""

from typing import ClassVar

from torch import Tensor

from attnbench.mixers.layers import Projection
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.delta.delta_rule import DELTA_RULE
from attnbench.settings.options import option


class DeltaNet(RecurrentMixer):
    """DeltaNet (Yang, Wang, Zhang, Shen and Kim, 2024; arXiv 2406.06484), per head, with S_0 = 0:

        S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)

    q, k and v come through a short convolution and SiLU, b_t = sigmoid(beta(x_t)).

    The options are the paper's.
    """

    operator = DELTA_RULE
    activation, unit_keys, needs_qk_norm = True, True, True
    conv_size, output_norm = 4, True
    qk_norm: bool = option(True, "query and key of length 1; without it the recurrence can grow")
    negative_eigenvalues: bool = option(
        False, "beta in 0..2 instead of 0..1: the state can be reflected (arXiv 2411.12537)"
    )

    num_steps: ClassVar[int] = 1
    """Steps of the delta rule a position, each with its own key, value and strength."""

    def add_parts(self) -> None:
        self.max_beta = 2 if self.negative_eigenvalues else 1
        self.beta = Projection(self.dim, self.num_steps * self.heads)
        self.move_last("norm", "output")

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        beta_BTH = self.beta(x_BTD).to(accumulation_dtype(x_BTD.dtype))
        return beta_BTH.new_zeros(*x_BTD.shape[:2], self.heads), self.max_beta * beta_BTH.sigmoid()
