"""RWKV-7: a memory whose key channels decay each at its own pace, and that erases along a direction of its own."""

import math
from typing import ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate, by_heads, head_norm
from attnbench.mixers.decay import DecayInit, spread_steps
from attnbench.mixers.diagonal import DiagonalMixer, DiagonalState
from attnbench.mixers.layers import LowRank
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.delta.delta_rule import unit_length
from attnbench.ops.diagonal.diagonal_decay import DiagonalInputs, diagonal_decay_flops
from attnbench.ops.layers.rotary import rotate, rotate_both
from attnbench.settings.check import check_value

FASTEST = math.exp(-0.5)
"""Largest -log a_t: a position keeps at least 0.545 of a channel."""

NORM_EPS = 64e-5
"""The paper's: a first position's output is q . k times v, and where q . k is nearly 0 a norm makes much of it."""

SHIFT_POWERS = (0.2, 0.7, 0.7, 0.9, 0.9, 0.2)
"""How fast the initial token shifts fall from channel to channel: of receptance, key, value, decay, rate and gate."""


class RWKV7State(NamedTuple):
    """DiagonalState, and the last input."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    previous_B1D: Tensor


class RWKV7(DiagonalMixer):
    """RWKV-7 (Peng et al., 2025; arXiv 2503.14456), time mixing alone, per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K)
        e = alpha * kap,   r = kap / a,   u = v

    q, k and v are projections of x; log a_t = -exp(-1/2) sigmoid(decay(x_t) + decay_bias); alpha = sigmoid(rate(x_t) +
    rate_bias), a learning rate a channel; kap = key_removal * k at a length of 1; and k, after that, times 1 +
    (alpha - 1) key_blend. To the normed y comes the bonus (q . (bonus * k)) v. Each of the six maps reads its own token
    shift, x_t + shift * (x_{t-1} - x_t).

    Its defaults: K = V = 64, token shift, no convolution, no positions. Ours differs in these places. Its value
    residual, which mixes the first layer's values into those of the others, cannot pass a mixer's interface and is left
    out. Its query is not scaled, which to the norm of y matters through the eps alone; the bonus is of the unscaled one
    here too. It norms each head by a group norm with a bias, we by RMS. Its output gate is up(sigmoid(down(x))), ours
    the sigmoid of up(down(x)). Its matrices begin at zero, orthogonal or uniform, its norm's gain at ((1 + layer) /
    num_layers)^0.7, ours as all of this bench. `decay_init`.

    Initial values are those of its authors' code (RWKV-LM) at the paper's time, but for the bonus, then 0 and now -0.04
    there. Since then that code, and flash-linear-attention 0.6 with it, begins elsewhere: decay_bias at -5.5 + 6 p +
    2.5 zigzag, p a power of the channel, rate_bias around -0.19, key_removal around 0.71, key_blend at 1.02, and ranks
    of 2.5 sqrt(dim) and 5 sqrt(dim).

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        layer, num_layers: for the initial shifts; from the model.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla; auto: triton on CUDA where its kernels fit, otherwise torch.
        rotary_theta: base of the wavelengths of rotary positions on query, key and kap, see DiagonalMixer; null for
            none.
        conv_size: taps of a short convolution over query, key and value, beside the token shift; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain; kap has length 1 anyway.
        output_norm: RMS norm with a learned gain over each head's output, before bonus, gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        token_shift: each map reads a mixture of the position and the one before; false: the position alone.
        decay_rank, rate_rank, gate_rank: of the maps to log a, alpha and the gate; null: the authors' of that time,
            about 1.8 sqrt(dim) for the first two and 0.6 dim^0.8, in steps of 32.
        decay_init: initial decay_bias. spread: half-lives of 693 down to 1.7 positions, evenly by ratio over all
            channels, the slowest first. paper: -6.5 to -1.5, by a power of the channel that grows with the layer:
            half-lives of 761 down to 6.3.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset(
        {"decay_bias", "rate_bias", "shift", "key_removal", "key_blend", "bonus"}
    )

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        layer: int,
        num_layers: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "sigmoid",
        token_shift: bool = True,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        gate_rank: int | None = None,
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
            gate_rank=_rank(0.6 * dim**0.8) if gate_rank is None else gate_rank,
            norm_eps=NORM_EPS,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init, self.has_gate = decay_init, output_gate != "none"
        self.layer, self.num_layers = layer, num_layers
        self.query_norm, self.key_norm = head_norm(head_width, qk_norm), head_norm(head_width, qk_norm)
        shape, width = (self.num_heads, head_width), self.num_heads * head_width
        rank = _rank(1.8 * dim**0.5)
        self.decay = LowRank(
            dim, rank if decay_rank is None else decay_rank, width, setting="decay_rank", activation=torch.tanh
        )
        self.rate = LowRank(dim, rank if rate_rank is None else rate_rank, width, setting="rate_rank")
        # Of maps that read something: the last is the gate's.
        num_shifts = len(SHIFT_POWERS) - (not self.has_gate)
        self.shift = nn.Parameter(torch.empty(num_shifts, dim)) if token_shift else None
        self.decay_bias, self.rate_bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.key_removal, self.key_blend = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.bonus = nn.Parameter(torch.empty(shape))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the decay's biases as `decay_init` has it, and all else that is no matrix as the class says."""
        depth = self.layer / max(self.num_layers - 1, 1)
        with torch.no_grad():
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
                share_D = torch.arange(self.shift.shape[1]) / self.shift.shape[1]
                for shift_D, power in zip(self.shift, SHIFT_POWERS, strict=False):
                    shift_D.copy_(1 - share_D ** (power * left))

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> RWKV7State:
        state, weight = super().init_state(batch_size, max_length, dtype), self.output.projection.weight
        width = weight.shape[0] if self.shift is not None else 0
        previous_B1D = torch.zeros(batch_size, 1, width, dtype=dtype, device=weight.device)
        return RWKV7State(*state, previous_B1D=previous_B1D)

    def mixing_flops(self, length: int) -> int:
        return diagonal_decay_flops(length, self.num_heads, self.head_width, self.value_width, 4)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return self._log_decay(self._shifted(x_BTD, None)[3])

    def _log_decay(self, shifted_BTD: Tensor) -> Tensor:
        return self._in_pairs(-FASTEST * self._biased(self.decay, self.decay_bias, shifted_BTD).sigmoid())

    def _shifted(self, x_BTD: Tensor, state: RWKV7State | None) -> list[Tensor]:
        """Return what each map reads, in the order of SHIFT_POWERS; the last input in the state moves on."""
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
        """Return a map's output and a bias by heads, in float32 at least."""
        return by_heads((low_rank(x_BTD).to(accumulation_dtype(x_BTD.dtype)),), self.head_width)[0] + bias_HK

    def _inputs(
        self, x_BTD: Tensor, state: DiagonalState | None, angles: Tensor | None
    ) -> tuple[DiagonalInputs, Tensor]:
        shifted = self._shifted(x_BTD, state)  # pyright: ignore[reportArgumentType]
        query, key, value = self._heads(shifted[:3], state)
        log_decay_BTHK = self._log_decay(shifted[3])
        rate_BTHK = self._biased(self.rate, self.rate_bias, shifted[4]).sigmoid()
        removed = unit_length(key * self.key_removal.to(key.dtype))
        key = (key * (1 + (rate_BTHK - 1) * self.key_blend)).to(key.dtype)
        query, key = rotate_both(self.query_norm(query), self.key_norm(key), angles)
        erase = (rate_BTHK * removed).to(key.dtype)
        if angles is not None:
            erase, removed = rotate(erase, angles), rotate(removed, angles)
        read = (removed * (-log_decay_BTHK).exp()).to(key.dtype)
        query = query * self.head_width**-0.5
        inputs = DiagonalInputs(query, key, value, log_decay_BTHK, erase_BTHK=erase, read_BTHK=read)
        return inputs, shifted[-1]

    def _finish(self, mixed_BTHV: Tensor, inputs: DiagonalInputs, gate_BTD: Tensor) -> Tensor:
        bonus_HK = (self.head_width**0.5 * self._in_pairs(self.bonus)).to(inputs.key_BTHK.dtype)
        weight_BTH1 = (inputs.query_BTHK * inputs.key_BTHK * bonus_HK).sum(-1, keepdim=True)
        mixed_BTHV = self.norm(mixed_BTHV) + weight_BTH1 * inputs.value_BTHV
        return self.output(mixed_BTHV.flatten(2), gate_BTD)


def _rank(size: float) -> int:
    return max(32, round(size / 32) * 32)
