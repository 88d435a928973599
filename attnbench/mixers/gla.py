"""Gated linear attention: a sum of keys times values of which every key channel forgets at a pace of its own."""

from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate, by_heads, head_norm
from attnbench.mixers.decay import DecayInit, spread_steps
from attnbench.mixers.diagonal import DiagonalMixer, DiagonalState
from attnbench.mixers.layers import LowRank
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import DiagonalInputs, diagonal_decay_flops
from attnbench.ops.layers.rotary import rotate_both
from attnbench.settings.check import check_value

TEMPER = 16
"""Root that is drawn of the gate: one of a half forgets half of the memory in so many positions."""


class GatedLinearAttention(DiagonalMixer):
    """Gated linear attention (Yang, Wang, Shen, Panda and Kim, 2024; arXiv 2312.06635), per head, with S_0 = 0:

        S_t = Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K),   e = 0

    a_t = sigmoid(decay(x_t) + decay_bias)^(1/16), decay of low rank; k and u = v straight from the projection.

    Its defaults: no convolution, no positions, RMS norm and SiLU gate; V = 2K = dim / heads. Ours differs in V = K,
    where K heads times head_width are the model's width, in an output gate without bias, and in `decay_init`.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla; auto: triton on CUDA where its kernels fit, otherwise torch.
        rotary_theta: base of the wavelengths of rotary positions on query and key, see DiagonalMixer; null for none.
        conv_size: taps of a short convolution over query, key and value; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_rank: rank of the map to the decay.
        decay_init: initial decay_bias. spread: half-lives of 693 down to 1.7 positions, evenly by ratio over all
            channels, the slowest first. paper: 0, half-lives of 16.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})
    paper_options: ClassVar[dict[str, Any]] = {"value_expansion": 2}

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "silu",
        decay_rank: int = 16,
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
            output_norm=output_norm,
            output_gate=output_gate,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init = decay_init
        self.query_norm, self.key_norm = head_norm(head_width, qk_norm), head_norm(head_width, qk_norm)
        self.decay = LowRank(dim, decay_rank, self.num_heads * head_width, setting="decay_rank")
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads * head_width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the biases as `decay_init` has it."""
        with torch.no_grad():
            self.decay_bias.zero_()
            if self.decay_init == "spread":
                # -log sigmoid(x) = 16 step where x = -log(exp(16 step) - 1).
                self.decay_bias.copy_(-(TEMPER * spread_steps(self.decay_bias.numel())).expm1().log())

    def mixing_flops(self, length: int) -> int:
        return diagonal_decay_flops(length, self.num_heads, self.head_width, self.value_width, 2)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        hidden_BTC = self.decay(x_BTD).to(accumulation_dtype(x_BTD.dtype)) + self.decay_bias
        return self._in_pairs(by_heads((F.logsigmoid(hidden_BTC) / TEMPER,), self.head_width)[0])

    def _inputs(
        self, x_BTD: Tensor, state: DiagonalState | None, angles: Tensor | None
    ) -> tuple[DiagonalInputs, Tensor]:
        query, key, value = self._heads(x_BTD, state)
        query, key = rotate_both(self.query_norm(query), self.key_norm(key), angles)
        return DiagonalInputs(query * self.head_width**-0.5, key, value, self.log_decay(x_BTD)), x_BTD
