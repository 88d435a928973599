"""Gated DeltaNet-2: a memory in which each key erases and writes channel by channel."""

from torch import Tensor

from attnbench.mixers.around import by_heads
from attnbench.mixers.kda import KimiDeltaAttention
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.options import option


class GatedDeltaNet2(KimiDeltaAttention):
    """Gated DeltaNet-2 (2026; arXiv 2605.22791), per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K)
        e = k,   r = b * k,   u = w * v

    Kimi Delta Attention with strengths of channels: b_t = sigmoid(erase(x_t)) of key channels, w_t =
    sigmoid(write(x_t)) of value channels. With rotary positions both key channels of a pair get the mean of their
    strengths.
    """

    negative_eigenvalues: bool = option(False, "erasure in 0..2 instead of 0..1; what is written stays in 0..1")

    def add_strengths(self) -> None:
        self.erase = Projection(self.dim, self.heads * self.key_width)
        self.write = Projection(self.dim, self.heads * self.value_width)

    def strengths(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(x_BTD.dtype)
        (erase_BTHK,) = by_heads((self.erase(x_BTD).to(dtype).sigmoid(),), self.key_width)
        (write_BTHV,) = by_heads((self.write(x_BTD).to(dtype).sigmoid(),), self.value_width)
        return self.max_erasure * self.in_pairs(erase_BTHK), write_BTHV
