"""Mamba-3: Mamba-2 with a better rule of integration, turning keys and no convolution."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.base import State
from attnbench.mixers.decay import DECAY_INIT, DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.layers import Projection
from attnbench.mixers.state_space import StateSpace
from attnbench.ops.common.cumulative_sum import cumulative_sum
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.layers.rotary import turn
from attnbench.ops.scalar.lagged_scalar_decay import (
    LAGGED_SCALAR_DECAY,
    lagged_scalar_decay_step,
    packed_lagged_scalar_decay,
)
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING
from attnbench.settings.options import option


class Mamba3State(NamedTuple):
    memory_BHKV: Tensor
    key_BHK: Tensor
    value_BHV: Tensor
    """The last position's key and value; the next position completes their weight."""
    angle_BHA: Tensor
    """Sum of all angles so far, within a full turn."""
    history_BWC: Tensor
    position: Tensor


class Shifted(nn.Module):
    """norm(x) + bias of each head, (B, T, 1, K) to (B, T, H, K)."""

    def __init__(self, norm: nn.Module, num_heads: int, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(torch.empty(num_heads, width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        nn.init.ones_(self.bias)

    def forward(self, x_BT1K: Tensor) -> Tensor:
        return self.norm(x_BT1K) + self.bias.to(x_BT1K.dtype)


class Mamba3(StateSpace):
    """Mamba-3 of one input and one output a head, SISO (Lahoti et al., 2026; arXiv 2603.15569), with S_0 = 0:

        S_t = a_t S_{t-1} + (1 - l_t) d_t a_t k_{t-1} v_{t-1}^T + l_t d_t k_t v_t^T,   y_t = S_t^T q_t + skip v_t

    log a_t = -d_t r_t, at least -MAX_FORGETTING, with a rate r_t = softplus(decay(x_t) + decay_bias), at least
    1e-4, and a step d_t = softplus(step(x_t) + step_bias); l_t = sigmoid(mixture(x_t)). All heads share q and k,
    normed, with a bias of each head. The first half of their channels is turned, in pairs, by the sum over positions 1
    ... t of d_t pi tanh(angle(x_t)).
    """

    operator, state_class, least_width = LAGGED_SCALAR_DECAY, Mamba3State, 2
    rotary_theta: float | None = option(None, "base of rotary positions, beside the turning by the input; null: none")
    conv_size: int = option(0, "taps of a short convolution over query, key and value, with SiLU; 0: neither")
    qk_norm, output_gate = True, "silu"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: rates of 0.69 and steps drawn in 0.001..0.1")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias", "step_bias", "skip"})
    undone_by: ClassVar[dict[str, str]] = {"conv_size": "its rule of two positions replaces the convolution"}

    def add_parts(self) -> None:
        norms = (self.query_norm, self.key_norm)
        self.query_norm, self.key_norm = (Shifted(norm, self.heads, self.key_width) for norm in norms)
        self.step_size, self.decay, self.mixture = (Projection(self.dim, self.heads) for _ in range(3))
        self.angle = Projection(self.dim, max(self.key_width // 4, 1))
        self.decay_bias, self.step_bias = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        self.add_skip()

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return options.get("conv_size", 0) > 0

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        if self.decay_init == "spread":
            # With steps spread instead of rates a fast head would write hundreds of times as strongly as a slow one.
            step_H = torch.full((self.heads,), 0.01)
            rate_H = spread_steps(self.heads) / step_H
        else:
            step_H = 0.001 * 100 ** torch.rand(self.heads, generator=generator)
            rate_H = torch.full((self.heads,), math.log(2))
        self.decay_bias.copy_(inverse_softplus(rate_H))
        self.step_bias.copy_(inverse_softplus(step_H))
        nn.init.ones_(self.skip)

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return log a, l d and (1 - l) d, (B, T, H), and the angles that each position adds, (B, T, H, A)."""
        gates = (self.decay, self.step_size, self.mixture, self.angle)
        decay, step, mixture, angle = (at_least_float32(gate(x_BTD)) for gate in gates)
        step_BTH = F.softplus(step + self.step_bias)
        log_decay_BTH = -(F.softplus(decay + self.decay_bias).clamp(min=1e-4) * step_BTH).clamp(max=MAX_FORGETTING)
        angle_BTHA = step_BTH[..., None] * (math.pi * angle.tanh())[:, :, None]
        return log_decay_BTH, mixture.sigmoid() * step_BTH, (-mixture).sigmoid() * step_BTH, angle_BTHA

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        if state is not None or self.backend != "triton" or not self.qk_norm or self.positions.theta is not None:
            return super().forward(x_BTD, state)
        from attnbench.ops.layers.triton.turned_heads import turned_heads

        packed_BTC = self.query_key_value.packed(x_BTD)
        log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = self.signals(x_BTD)
        norms: Any = (self.query_norm.norm, self.key_norm.norm)
        gain_R2K = torch.stack([norm.weight for norm in norms])[None]
        bias_R2HK = torch.stack([self.query_norm.bias, self.key_norm.bias])[None]
        heads_BTC = turned_heads(packed_BTC, gain_R2K, bias_R2HK, cumulative_sum(angle_BTHA), norms[0].eps)
        gates = (log_decay_BTH, own_BTH + next_of(completing_BTH), own_BTH)
        mixed_BTHV, _ = packed_lagged_scalar_decay(heads_BTC, *gates, None, self.heads, self.key_width)
        value_BTHV = packed_BTC[..., 2 * self.key_width :].unflatten(-1, (self.heads, -1))
        return self.finish(mixed_BTHV, (None, None, value_BTHV), x_BTD), None

    def mix(self, inputs: tuple[Any, ...], memory: Any) -> tuple[Tensor, Any]:
        query_BTHK, key_BTHK, value_BTHV, log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = inputs
        angle_BTHA, before_BHKV = cumulative_sum(angle_BTHA), None
        if memory is not None:
            memory_BHKV, late_key_BHK, late_value_BHV, turned_BHA = memory
            angle_BTHA = angle_BTHA + turned_BHA[:, None]
        heads = (turn(query_BTHK, angle_BTHA), turn(key_BTHK, angle_BTHA), value_BTHV, log_decay_BTH)
        if memory is not None and self.backend == "triton" and value_BTHV.shape[1] == 1:
            late_pair, last_BHKV = (late_key_BHK, late_value_BHV), memory_BHKV
            mixed_BTHV = lagged_scalar_decay_step(*heads, own_BTH, memory_BHKV, late_pair, completing_BTH[:, 0])
        else:
            if memory is not None:
                key_BHK1 = completing_BTH[:, 0, :, None, None] * late_key_BHK[..., None]
                before_BHKV = memory_BHKV + key_BHK1 * late_value_BHV[:, :, None]
            weights = (own_BTH + next_of(completing_BTH), own_BTH)
            mixed_BTHV, last_BHKV = self.operator.scan(*heads, *weights, before_BHKV, self.backend)
        if memory is None or last_BHKV is None:
            return mixed_BTHV, None
        return mixed_BTHV, (last_BHKV, heads[1][:, -1], value_BTHV[:, -1], angle_BTHA[:, -1].remainder(2 * math.pi))

    def define(self, inputs: tuple[Any, ...], memory: Any) -> tuple[Tensor, Any]:
        query_BTHK, key_BTHK, value_BTHV, log_decay_BTH, own_BTH, completing_BTH, angle_BTHA = inputs
        angle_BTHA = angle_BTHA.cumsum(1)
        heads = (turn(query_BTHK, angle_BTHA), turn(key_BTHK, angle_BTHA), value_BTHV, log_decay_BTH)
        return self.operator.define(*heads, own_BTH + next_of(completing_BTH), own_BTH, memory[0])

    def letters(self) -> dict[str, int]:
        return {**super().letters(), "A": self.angle.out_features}


def next_of(completing_BTH: Tensor) -> Tensor:
    """Return what each position adds to the weight of the one before it; 0 at the last, where it is not known yet."""
    return F.pad(completing_BTH[:, 1:], (0, 0, 0, 1))
