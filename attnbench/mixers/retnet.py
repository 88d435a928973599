"""RetNet: a memory that every head forgets at a fixed speed."""

import torch
from torch import Tensor

from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY


class RetNet(RecurrentMixer):
    """Retention (Sun et al., 2023; arXiv 2307.08621), per head h = 0 ... H - 1, with S_0 = 0:

        S_t = a S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),   a = 1 - 2^(-5-h)

    q and k have rotary positions. Half-lives are 22 positions in the first head, 44 in the second and so on.

    The paper has 8 or more heads of K = 256 and V = 2K. Ours norms heads by RMS instead of a group norm with divisions
    by row sums, which either norm undoes, and has no bias. K is the model's head_width.
    """

    operator, decays = SCALAR_DECAY, True
    value_expansion, rotary_theta, output_norm, output_gate = 2, 10000.0, True, "silu"

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        head_H = torch.arange(self.heads, device=x_BTD.device, dtype=accumulation_dtype(x_BTD.dtype))
        log_decay_H = torch.log1p(-(2 ** (-5 - head_H)))
        # One for all sequences of the batch.
        return log_decay_H.expand(1, x_BTD.shape[1], self.heads), None
