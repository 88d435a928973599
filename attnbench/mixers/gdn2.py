"""Gated DeltaNet-2: a memory in which each key erases channel by channel, and is written channel by channel."""

from typing import ClassVar

from torch import Tensor

from attnbench.mixers.around import Gate, by_heads
from attnbench.mixers.decay import DecayInit
from attnbench.mixers.kda import KimiDeltaAttention
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import diagonal_decay_flops


class GatedDeltaNet2(KimiDeltaAttention):
    """Gated DeltaNet-2 (2026; arXiv 2605.22791), per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K)
        e = k,   r = b * k,   u = w * v

    As Kimi Delta Attention, whose decay it has, but for the strengths: b_t = sigmoid(erase(x_t)) a number a key
    channel, w_t = sigmoid(write(x_t)) one a value channel. Where all of them are equal in a head it is Kimi Delta
    Attention.

    Its defaults are that mixer's. Ours differs as there. With rotary positions the two key channels that are turned
    together are erased alike, by the mean of their strengths.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla, which takes heads of up to 256 key channels; auto: triton on
            CUDA where its kernels fit, otherwise torch.
        rotary_theta: base of the wavelengths of rotary positions on query and key, see DiagonalMixer; null for none.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        gate_rank, decay_rank: ranks of the maps to the output gate and to the decay; null for V.
        negative_eigenvalues: b_t in 0..2 instead of 0..1; w_t stays in 0..1.
        decay_init: as KimiDeltaAttention's.
    """

    no_weight_decay: ClassVar[frozenset[str]] = KimiDeltaAttention.no_weight_decay

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 4,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: Gate = "sigmoid",
        gate_rank: int | None = None,
        decay_rank: int | None = None,
        negative_eigenvalues: bool = False,
        decay_init: DecayInit = "spread",
    ) -> None:
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            value_expansion=value_expansion,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
            gate_rank=gate_rank,
            decay_rank=decay_rank,
            negative_eigenvalues=negative_eigenvalues,
            decay_init=decay_init,
        )

    def mixing_flops(self, length: int) -> int:
        return diagonal_decay_flops(length, self.num_heads, self.head_width, self.value_width, 3)

    def _add_strengths(self, dim: int) -> None:
        self.erase = Projection(dim, self.num_heads * self.head_width)
        self.write = Projection(dim, self.num_heads * self.value_width)

    def _strengths(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(x_BTD.dtype)
        (erase_BTHK,) = by_heads((self.erase(x_BTD).to(dtype).sigmoid(),), self.head_width)
        (write_BTHV,) = by_heads((self.write(x_BTD).to(dtype).sigmoid(),), self.value_width)
        return self.max_erasure * self._in_pairs(erase_BTHK), write_BTHV
