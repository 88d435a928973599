"""Mamba-2: a state space whose step size the input chooses, in the form of attention with a decay."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate
from attnbench.mixers.base import head_count
from attnbench.mixers.decay import DecayInit, init_decay
from attnbench.mixers.decayed import DecayedAttention, add_skip, check_state_width, state_widths
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING, scalar_decay_flops
from attnbench.settings.check import check_value


class Mamba2(DecayedAttention):
    """Mamba-2 (Dao and Gu, 2024; arXiv 2405.21060), per head, with S_0 = 0:

        S_t = a_t S_{t-1} + k_t (d_t v_t)^T,   y_t = S_t^T q_t + skip v_t,   a_t = exp(-exp(log_decay_rate) d_t)

    In the paper's letters k is B, q is C, v is x and skip is D. q and k, of N channels, serve all heads. q, k and v
    come through a short convolution and SiLU; d_t = softplus(step(x_t) + step_bias). a_t is not below
    exp(-MAX_FORGETTING).

    The paper's: twice the model's width in heads of 64 values, N = 128, a convolution of 4 taps with a bias, and no
    feed-forward in its block. Ours differs in four places. Its block has the model's feed-forward, which
    model.feed_forward_width=0 takes away (then match_by=layers). The convolution has no bias. Where the paper gates by
    SiLU and then norms all heads together, the norm is a head's own and comes before the gate. And its initial decays
    are a choice, see `decay_init`.

    Args:
        num_heads: null for 2 dim / head_width, the paper's expansion by 2; the inner width is num_heads × head_width.
        head_width: channels of value a head.
        state_width: channels of query and key, N.
        backend: auto | torch | triton | fla. triton is this bench's own kernel, for CUDA and K = state_width and V =
            head_width that are multiples of 16, K up to 128; auto: triton where it runs, otherwise torch. fla is flash-
            linear-attention's kernel of simple GLA, for CUDA.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned; null for none.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: RMS norm of query and key, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_init: initial values of exp(log_decay_rate), the rate, and softplus(step_bias), the step, whose product is
            -log a_t. spread: rates of 1 and steps of 0.001 to 0.4, evenly by ratio over the heads: half-lives of 693
            down to 1.7 positions. paper: rates drawn evenly from 1..16 and steps, by their logarithms, from 0.001..0.1.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "step_bias", "skip"})

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        state_width: int = 128,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 4,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "silu",
        decay_init: DecayInit = "spread",
    ) -> None:
        check_state_width(state_width, rotary_theta)
        super().__init__(
            dim,
            2 * head_count(None, dim, head_width) if num_heads is None else head_count(num_heads, dim, head_width),
            state_width,
            head_width,
            shares_keys=True,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.step_size = Projection(dim, self.num_heads)
        self.step_bias = nn.Parameter(torch.empty(self.num_heads))
        self.log_decay_rate = nn.Parameter(torch.empty(self.num_heads))
        self.skip = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        return options.get("state_width", 128), options["head_width"]

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `state_width`."""
        return state_widths(options, dim=dim)

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set rates and steps as `decay_init` has it, and the skip to 1."""
        init_decay(self.log_decay_rate, self.step_bias, self.decay_init, generator)
        nn.init.ones_(self.skip)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        step_BTH = F.softplus(at_least_float32(self.step_size(x_BTD)) + self.step_bias)
        forgetting_BTH = self.log_decay_rate.to(step_BTH.dtype).exp() * step_BTH
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), step_BTH

    def finish(self, mixed_BTHV: Tensor, value_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return super().finish(add_skip(mixed_BTHV, value_BTHV, self.skip), value_BTHV, x_BTD)

    def mixing_flops(self, length: int) -> int:
        return scalar_decay_flops(length, self.num_heads, self.key_width, self.value_width)
