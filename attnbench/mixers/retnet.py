"""RetNet: a memory that every head forgets at a speed of its own, which nothing learns."""

from typing import Any

import torch
from torch import Tensor

from attnbench.mixers.around import Gate
from attnbench.mixers.base import expanded, expansions, head_count
from attnbench.mixers.decayed import DecayedAttention
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.scalar.scalar_decay import scalar_decay_flops


class RetNet(DecayedAttention):
    """Retention (Sun et al., 2023; arXiv 2307.08621), per head h = 0 ... H - 1, with S_0 = 0:

        S_t = a S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),   a = 1 - 2^(-5-h)

    q and k are turned by rotary positions. The decays are constants: half-lives of 22 positions in the first head, of
    44 in the second and so on, which is the paper's choice and not this bench's.

    The paper's: 8 or more heads of K = 256, V = 2K, rotary positions, no convolution, a norm a head, a SiLU gate. Ours
    differs in three places. The norm of each head is an RMS norm, which as the paper's group norm makes the scale of a
    row irrelevant, so that the paper's divisions by row sums are left out. There is no bias. K is the model's
    head_width, and by that their number, which the paper's constants depend on.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. triton is this bench's own kernel, for CUDA and K and V that are multiples
            of 16, K up to 128; auto: triton where it runs, otherwise torch. fla is flash-linear-attention's kernel of
            simple GLA, for CUDA.
        rotary_theta: base of the rotary positions' wavelengths; null for no positions.
        conv_size: taps of a short convolution over query, key and value; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
    """

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 2,
        backend: str = "auto",
        rotary_theta: float | None = 10000.0,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "silu",
    ) -> None:
        super().__init__(
            dim,
            head_count(num_heads, dim, head_width),
            head_width,
            expanded(head_width, value_expansion),
            scale=head_width**-0.5,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `value_expansion`."""
        return expansions(options, dim=dim, head_width=head_width)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        head_H = torch.arange(self.num_heads, device=x_BTD.device, dtype=accumulation_dtype(x_BTD.dtype))
        log_decay_H = torch.log1p(-(2 ** (-5 - head_H)))
        return log_decay_H.expand(1, x_BTD.shape[1], self.num_heads), None

    def mixing_flops(self, length: int) -> int:
        return scalar_decay_flops(length, self.num_heads, self.key_width, self.value_width)
