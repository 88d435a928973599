"""Simple gated linear attention: a memory that every head forgets as fast as the input says."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate
from attnbench.mixers.base import expanded, expansions, head_count
from attnbench.mixers.decay import DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.decayed import DecayedAttention
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING, scalar_decay_flops
from attnbench.settings.check import check_value

SOFTENING = 16
"""Root that the gate is taken to: a head whose gate is half open keeps its memory for tens of positions."""


class SimpleGLA(DecayedAttention):
    """Gated linear attention (Yang et al., 2024; arXiv 2312.06635) with one gate a head instead of one a channel, which
    is the gated retention of Sun et al. (2024; arXiv 2405.05254); per head, with S_0 = 0:

        S_t = a_t S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),   a_t = sigmoid(-decay(x_t) - decay_bias)^(1/16)

    q, k and v come through a short convolution and SiLU. a_t is not below exp(-MAX_FORGETTING).

    The papers': V = K or 2K, a norm a head, a SiLU gate, and no bias of a_t, so that all heads begin at a half-life of
    16 positions. Ours has the bias, which is where `decay_init` lies, and the RMS norm of both papers. The convolution
    is neither's but that of flash-linear-attention's layer of this name; rotary positions, which gated retention has,
    are off.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. triton is this bench's own kernel, for CUDA and K and V that are multiples
            of 16, K up to 128; auto: triton where it runs, otherwise torch. fla is flash-linear-attention's kernel of
            simple GLA, for CUDA.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned; null for none.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_init: initial half-lives. spread: of 693 down to 1.7 positions, evenly by ratio over the heads, of 693
            with one head. paper: of 16 positions.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

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
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "silu",
        decay_init: DecayInit = "spread",
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
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.decay = Projection(dim, self.num_heads)
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `value_expansion`."""
        return expansions(options, dim=dim, head_width=head_width)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the bias as `decay_init` has it."""
        if self.decay_init == "spread":
            self.decay_bias.copy_(inverse_softplus(SOFTENING * spread_steps(self.num_heads)))
        else:
            self.decay_bias.zero_()

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        forgetting_BTH = F.softplus(at_least_float32(self.decay(x_BTD)) + self.decay_bias) / SOFTENING
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), None

    def mixing_flops(self, length: int) -> int:
        return scalar_decay_flops(length, self.num_heads, self.key_width, self.value_width)
