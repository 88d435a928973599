"""Mamba-3: Mamba-2 with a better rule of integration, turning keys and no convolution."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate
from attnbench.mixers.base import State, head_count
from attnbench.mixers.decay import DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.decayed import DecayedAttention, add_skip, check_state_width, state_widths
from attnbench.mixers.layers import Projection
from attnbench.ops.common.cumulative_sum import cumulative_sum
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.layers.rotary import turn
from attnbench.ops.scalar.lagged_scalar_decay import (
    lagged_scalar_decay,
    lagged_scalar_decay_flops,
    lagged_scalar_decay_step,
    packed_lagged_scalar_decay,
    recurrent_lagged_scalar_decay,
)
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING
from attnbench.settings.check import check_value

MIN_RATE = 1e-4
"""Smallest rate of the decay."""


class Mamba3State(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    key_BHK: Tensor
    value_BHV: Tensor
    """Last position's, which the next one writes again, with a weight that it decides."""
    angle_BHA: Tensor
    """Sum of all angles so far, within a full turn."""
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class Shifted(nn.Module):
    """Add a bias of each head to what all heads share: norm(x) + bias, (B, T, 1, K) to (B, T, H, K)."""

    def __init__(self, norm: nn.Module, num_heads: int, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(torch.empty(num_heads, width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        nn.init.ones_(self.bias)

    def forward(self, x_BT1K: Tensor) -> Tensor:
        return self.norm(x_BT1K) + self.bias.to(x_BT1K.dtype)


class Mamba3(DecayedAttention):
    """Mamba-3 of one input and one output a head, SISO (Lahoti et al., 2026; arXiv 2603.15569), with S_0 = 0:

        S_t = a_t S_{t-1} + (1 - l_t) d_t a_t k_{t-1} v_{t-1}^T + l_t d_t k_t v_t^T,   y_t = S_t^T q_t + skip v_t

    In the paper's letters k is B, q is C, v is x, d is Delta, l is lambda and skip is D. log a_t = -d_t r_t, not
    below -MAX_FORGETTING, of a rate r_t = softplus(decay(x_t) + decay_bias), at least MIN_RATE, and a step d_t =
    softplus(step(x_t) + step_bias); l_t = sigmoid(mixture(x_t)). q and k of all heads are one each, normed, and shifted
    by a bias of each head. Then the first half of their channels is turned, in pairs, by the sum over positions 1 ... t
    of d_t pi tanh(angle(x_t)).

    So position j is written with l_j d_j + (1 - l_{j+1}) d_{j+1}, and reads itself with l_j d_j alone. The last key and
    value stay in the state, and the next position completes their weight.

    The paper's: twice the model's width in heads of 64 values, N = 128, no convolution, RMS norm and biases of ones on
    query and key, no norm of the output, a SiLU gate, and a feed-forward between its blocks, as here. Ours differs in
    the bias of the rate, in which `decay_init` spreads the half-lives. Its variant of many inputs and outputs (MIMO) is
    not here.

    Args:
        num_heads: null for 2 dim / head_width, the paper's expansion by 2; the inner width is num_heads × head_width.
        head_width: channels of value a head.
        state_width: channels of query and key, N.
        backend: auto | torch | triton | fla. triton is this bench's own kernel, for CUDA and K = state_width and V =
            head_width that are multiples of 16, K up to 128; auto: triton where it runs, otherwise torch. fla is flash-
            linear-attention's kernel of simple GLA, for CUDA.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned besides; null for
            none.
        conv_size: taps of a short convolution over query, key and value, with SiLU after it; 0 for neither.
        qk_norm: RMS norm of query and key, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_init: initial values of the rate, softplus(decay_bias), and the step, softplus(step_bias), whose product
            is -log a_t. spread: steps of 0.01 and rates for half-lives of 693 down to 1.7 positions, evenly by
            ratio over the heads; steps that were spread would have a fast head write hundreds of times as strongly as
            a slow one. paper: rates of 0.69 and steps drawn, by their logarithms, from 0.001..0.1.
    """

    is_packed: ClassVar[bool] = False
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias", "step_bias", "skip"})
    undone_by: ClassVar[dict[str, str]] = {"conv_size": "its rule of two positions replaces the convolution"}

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        state_width: int = 128,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = True,
        output_norm: bool = False,
        output_gate: Gate = "silu",
        decay_init: DecayInit = "spread",
    ) -> None:
        check_state_width(state_width, rotary_theta, minimum=2)
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
        self.query_norm = Shifted(self.query_norm, self.num_heads, state_width)
        self.key_norm = Shifted(self.key_norm, self.num_heads, state_width)
        self.step_size, self.decay = Projection(dim, self.num_heads), Projection(dim, self.num_heads)
        self.mixture = Projection(dim, self.num_heads)
        # Of a width of 2 or 3 one pair is all that can turn.
        self.angle = Projection(dim, max(state_width // 4, 1))
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))
        self.step_bias = nn.Parameter(torch.empty(self.num_heads))
        self.skip = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return options.get("conv_size", 0) > 0

    @classmethod
    def widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        return options.get("state_width", 128), options["head_width"]

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `state_width`."""
        return state_widths(options, dim=dim, minimum=2)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set rates and steps as `decay_init` has it, and the skip to 1."""
        if self.decay_init == "spread":
            step_H = torch.full((self.num_heads,), 0.01)
            rate_H = spread_steps(self.num_heads) / step_H
        else:
            step_H = 0.001 * 100 ** torch.rand(self.num_heads, generator=generator)
            rate_H = torch.full((self.num_heads,), math.log(2))
        self.decay_bias.copy_(inverse_softplus(rate_H))
        self.step_bias.copy_(inverse_softplus(step_H))
        nn.init.ones_(self.skip)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log a, l d and (1 - l) d of every position, (B, T, H), and the angles that it adds, (B, T, H, A)."""
        decay, step, mixture, angle = (
            at_least_float32(gate(x_BTD)) for gate in (self.decay, self.step_size, self.mixture, self.angle)
        )
        step_BTH = F.softplus(step + self.step_bias)
        log_decay_BTH = -(F.softplus(decay + self.decay_bias).clamp(min=MIN_RATE) * step_BTH).clamp(max=MAX_FORGETTING)
        angle_BTHA = step_BTH[..., None] * (math.pi * angle.tanh())[:, :, None]
        return log_decay_BTH, mixture.sigmoid() * step_BTH, (-mixture).sigmoid() * step_BTH, angle_BTHA

    def forward(self, x_BTD: Tensor, state: Mamba3State | None = None) -> tuple[Tensor, State | None]:
        if state is None and self.backend == "triton" and self.qk_norm and self.positions.theta is None:
            mixed_BTHV, value_BTHV = self._mix_turned(x_BTD)
            return self.finish(mixed_BTHV, value_BTHV, x_BTD), None
        return super().forward(x_BTD, state)

    def _mix_turned(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what `project` and `mix` do without a state by our kernels, which norm, shift and turn in one pass;
        return the value's heads too."""
        from attnbench.ops.layers.triton.turned_heads import turned_heads

        packed_BTC = self.query_key_value.packed(x_BTD)
        log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = self.gates(x_BTD)
        norms: Any = (self.query_norm.norm, self.key_norm.norm)
        gain_R2K = torch.stack([norm.weight for norm in norms])[None]
        bias_R2HK = torch.stack([self.query_norm.bias, self.key_norm.bias])[None]
        heads_BTC = turned_heads(packed_BTC, gain_R2K, bias_R2HK, cumulative_sum(angle_BTHA), norms[0].eps)
        gates = (log_decay_BTH, own_BTH + next_of(completing_BTH), own_BTH)
        mixed_BTHV, _ = packed_lagged_scalar_decay(heads_BTC, *gates, None, self.num_heads, self.key_width)
        return mixed_BTHV, packed_BTC[..., 2 * self.key_width :].unflatten(-1, (self.num_heads, -1))

    def mix(
        self, query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, *gates: Tensor, state: Mamba3State | None
    ) -> Tensor:
        log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = gates
        angle_BTHA, memory_BHKV = cumulative_sum(angle_BTHA), None
        if state is not None:
            angle_BTHA = angle_BTHA + state.angle_BHA[:, None]
        query_BTHK, key_BTHK = turn(query_BTHK, angle_BTHA), turn(key_BTHK, angle_BTHA)
        inputs = (query_BTHK, key_BTHK, value_BTHV, log_decay_BTH)
        if state is not None and self.backend == "triton" and query_BTHK.shape[1] == 1:
            last_BHKV, late_pair = state.memory_BHKV, (state.key_BHK, state.value_BHV)
            mixed_BTHV = lagged_scalar_decay_step(*inputs, own_BTH, last_BHKV, late_pair, completing_BTH[:, 0])
        else:
            if state is not None:
                key_BHK1 = completing_BTH[:, 0, :, None, None] * state.key_BHK[..., None]
                memory_BHKV = state.memory_BHKV + key_BHK1 * state.value_BHV[:, :, None]
            weights = (own_BTH + next_of(completing_BTH), own_BTH)
            mixed_BTHV, last_BHKV = lagged_scalar_decay(*inputs, *weights, memory_BHKV, self.backend)
        if state is not None and last_BHKV is not None:
            last = (last_BHKV, key_BTHK[:, -1], value_BTHV[:, -1], angle_BTHA[:, -1].remainder(2 * math.pi))
            for before, after in zip(state[:4], last, strict=True):
                before.copy_(after)
        return mixed_BTHV

    def define(self, query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, *gates: Tensor) -> Tensor:
        log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = gates
        angle_BTHA = angle_BTHA.cumsum(1)
        memory_BHKV = log_decay_BTH.new_zeros(len(key_BTHK), self.num_heads, self.key_width, self.value_width)
        inputs = (turn(query_BTHK, angle_BTHA), turn(key_BTHK, angle_BTHA), value_BTHV, log_decay_BTH)
        return recurrent_lagged_scalar_decay(*inputs, own_BTH + next_of(completing_BTH), own_BTH, memory_BHKV)

    def finish(self, mixed_BTHV: Tensor, value_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return super().finish(add_skip(mixed_BTHV, value_BTHV, self.skip), value_BTHV, x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> Mamba3State:
        memory_BHKV, history_BWC, position = super().init_state(batch_size, max_length, dtype)
        key_BHK, value_BHV = torch.zeros_like(memory_BHKV[..., 0]), torch.zeros_like(memory_BHKV[:, :, 0])
        angle_BHA = memory_BHKV.new_zeros(*memory_BHKV.shape[:2], self.angle.out_features)
        return Mamba3State(memory_BHKV, key_BHK, value_BHV, angle_BHA, history_BWC, position)

    def mixing_flops(self, length: int) -> int:
        return lagged_scalar_decay_flops(length, self.num_heads, self.key_width, self.value_width)


def next_of(completing_BTH: Tensor) -> Tensor:
    """Return each position's value of the next one; the last one's is not known yet, and 0."""
    return F.pad(completing_BTH[:, 1:], (0, 0, 0, 1))
