"""RWKV-7: key channels decay each at its own pace, and a direction beside the key is erased."""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import by_heads
from attnbench.mixers.base import State
from attnbench.mixers.decay import DECAY_INIT, DecayInit, spread_steps
from attnbench.mixers.layers import LowRank
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.delta.delta_rule import unit_length
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY
from attnbench.ops.layers.rotary import rotate, rotate_both
from attnbench.settings.options import option

FASTEST = math.exp(-0.5)
"""Largest -log a_t: a position keeps at least 0.545 of a channel."""

SHIFT_POWERS = (0.2, 0.7, 0.7, 0.9, 0.9, 0.2)
"""Powers by which the initial token shifts fall over the channels: receptance, key, value, decay, rate and gate."""


class RWKV7State(NamedTuple):
    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    previous_B1D: Tensor | None = None


class RWKV7(RecurrentMixer):
    """RWKV-7 (Peng et al., 2025; arXiv 2503.14456), time mixing alone, per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)
        e = alpha * kap,   r = kap / a

    log a_t = -exp(-1/2) sigmoid(decay(x_t) + decay_bias); alpha = sigmoid(rate(x_t) + rate_bias); kap = key_removal * k
    at a length of 1; k is then multiplied by 1 + (alpha - 1) key_blend. The normed y gets the bonus (q . (bonus * k))
    v. Each of the six maps reads its own token shift, x_t + shift * (x_{t-1} - x_t).

    The paper has K = V = 64 and a value residual, which needs another layer's values. Ours scales the query; norms by
    RMS, not a group norm with a bias; gates by sigmoid(up(down(x))), not up(sigmoid(down(x))); and fills matrices and
    gains as this bench does. Other initial values and ranks are RWKV-LM's at the paper's time, but for the bonus.
    """

    layer: int
    num_layers: int
    operator, state_class = DIAGONAL_DECAY, RWKV7State
    # The paper's: at a first position q . k may be nearly 0, and a norm would amplify it.
    norm_eps = 64e-5
    rotary_theta: float | None = option(
        None, "base of rotary positions on query, key and the erased direction; null: none"
    )
    conv_size: int = option(0, "taps of a short convolution over query, key and value, beside the token shift; 0: none")
    output_norm, output_gate = True, "sigmoid"
    token_shift: bool = option(True, "maps read a mixture of a position and the one before it")
    decay_rank: int | None = option(
        None, "rank of the map to the decay; null: about 1.8 sqrt(dim), in steps of 32, as the authors' then"
    )
    rate_rank: int | None = option(
        None, "rank of the map to how strongly a channel is erased; null: as decay_rank's null"
    )
    gate_rank: int | None = option(None, "rank of the map to the gate; null: about 0.6 dim^0.8, in steps of 32")
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} channels | paper: 6.3 to 761, by a power of the channel")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset(
        {"decay_bias", "rate_bias", "shift", "key_removal", "key_blend", "bonus"}
    )

    def rank_of_gate(self) -> int:
        return _rank(0.6 * self.dim**0.8) if self.gate_rank is None else self.gate_rank

    def add_parts(self) -> None:
        self.move_last("query_norm", "key_norm")
        shape, width, rank = (self.heads, self.key_width), self.heads * self.key_width, _rank(1.8 * self.dim**0.5)
        decay_rank, rate_rank = (rank if it is None else it for it in (self.decay_rank, self.rate_rank))
        self.decay = LowRank(self.dim, decay_rank, width, setting="decay_rank", activation=torch.tanh)
        self.rate = LowRank(self.dim, rate_rank, width, setting="rate_rank")
        num_shifts = len(SHIFT_POWERS) - (self.output_gate == "none")
        self.shift = nn.Parameter(torch.empty(num_shifts, self.dim)) if self.token_shift else None
        self.decay_bias, self.rate_bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.key_removal, self.key_blend = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.bonus = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        depth = self.layer / max(self.num_layers - 1, 1)
        self.rate_bias.zero_()
        self.key_removal.fill_(0.85)
        self.key_blend.fill_(1.0)
        self.bonus.fill_(-0.04)
        if self.decay_init == "spread":
            bias = (spread_steps(self.decay_bias.numel()) / FASTEST).logit()
        else:
            bias = -6.5 + 5 * torch.linspace(0, 1, self.decay_bias.numel()) ** (0.85 + depth**0.5)
        self.decay_bias.copy_(bias.view_as(self.decay_bias))
        if self.shift is not None:
            left = 1 - self.layer / self.num_layers
            share_D = torch.arange(self.dim) / self.dim
            for shift_D, power in zip(self.shift, SHIFT_POWERS, strict=False):
                shift_D.copy_(1 - share_D ** (power * left))

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> RWKV7State:
        state, width = super().init_state(batch_size, max_length, dtype), self.dim if self.token_shift else 0
        return state._replace(previous_B1D=state.history_BWC.new_zeros(batch_size, 1, width))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return self._log_decay(self._shifted(x_BTD, None)[3])

    def _log_decay(self, shifted_BTD: Tensor) -> Tensor:
        return self.in_pairs(-FASTEST * self._biased(self.decay, self.decay_bias, shifted_BTD).sigmoid())

    def _shifted(self, x_BTD: Tensor, state: State | None) -> list[Tensor]:
        """Return the input of each map, in the order of SHIFT_POWERS; with a state its last input moves on."""
        if self.shift is None:
            return [x_BTD] * len(SHIFT_POWERS)
        if state is None:
            previous_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        else:
            previous_BTD = torch.cat([state.previous_B1D.to(x_BTD.dtype), x_BTD[:, :-1]], dim=1)
            state.previous_B1D.copy_(x_BTD[:, -1:])
        change_BTD = previous_BTD - x_BTD
        return [x_BTD + change_BTD * shift_D for shift_D in self.shift.to(x_BTD.dtype)]

    def _biased(self, low_rank: nn.Module, bias_HK: Tensor, x_BTD: Tensor) -> Tensor:
        return by_heads((low_rank(x_BTD).to(accumulation_dtype(x_BTD.dtype)),), self.key_width)[0] + bias_HK

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Any, ...], Tensor]:
        shifted = self._shifted(x_BTD, state)
        query, key, value = self.split_heads(shifted[:3], None if state is None else state.history_BWC)
        log_decay_BTHK = self._log_decay(shifted[3])
        rate_BTHK = self._biased(self.rate, self.rate_bias, shifted[4]).sigmoid()
        removed = unit_length(key * self.key_removal.to(key.dtype))
        key = (key * (1 + (rate_BTHK - 1) * self.key_blend)).to(key.dtype)
        query, key = rotate_both(self.query_norm(query), self.key_norm(key), angles)
        erase = (rate_BTHK * removed).to(key.dtype)
        if angles is not None:
            erase, removed = rotate(erase, angles), rotate(removed, angles)
        reading = (removed * (-log_decay_BTHK).exp()).to(key.dtype)
        return (query * self.scale, key, value, log_decay_BTHK, None, None, erase, reading), shifted[-1]

    def finish(self, mixed_BTHV: Tensor, inputs: tuple[Any, ...], gate_BTD: Tensor) -> Tensor:
        query_BTHK, key_BTHK, value_BTHV = inputs[:3]
        bonus_HK = (self.key_width**0.5 * self.in_pairs(self.bonus)).to(key_BTHK.dtype)
        weight_BTH1 = (query_BTHK * key_BTHK * bonus_HK).sum(-1, keepdim=True)
        mixed_BTHV = self.norm(mixed_BTHV) + weight_BTH1 * value_BTHV
        return self.output(mixed_BTHV.flatten(2), gate_BTD)


def _rank(size: float) -> int:
    return max(32, round(size / 32) * 32)
