"""Gated DeltaNet: a memory that decays, and in which each key overwrites what it points to."""

from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import Mixer, head_count
from attnbench.mixers.decay import DecayInit, init_decay, softplus_decay
from attnbench.mixers.layers import Projection
from attnbench.ops.delta_rule import (
    AUTO_RULE,
    choose_delta_rule,
    delta_rule_flops,
    gated_delta_rule,
    packed_gated_delta_rule,
    recurrent_gated_delta_rule,
    unit_length,
)
from attnbench.ops.precision import accumulation_dtype
from attnbench.ops.rotary import rotate_both, rotate_packed
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError


class GatedDeltaNetState(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025; arXiv 2412.06464), per head, with M_0 = 0:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    q, k and v come through a short convolution and SiLU; a_t = exp(-exp(log_decay_rate) softplus(decay(x_t) +
    decay_bias)) as in Mamba-2, not below exp(-MAX_FORGETTING), b_t = sigmoid(beta(x_t)).

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. Triton, our own kernels, takes heads of 16, 32, 64, 128 and, in bfloat16,
            256 key channels and a multiple of 16 value channels; auto is triton for these on CUDA, and else torch.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned after convolution
            and SiLU; null for no positions. They are turned before they get unit length, which a rotation keeps.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        negative_eigenvalues: b_t in 0..2 instead of 0..1, so that the state can also be reflected (arXiv 2411.12537).
        decay_init: initial values of exp(log_decay_rate), the rate, and softplus(decay_bias), the time step, whose
            product is the decay -log a_t. spread: rates of 1 and steps of 0.001 to 0.4, evenly by ratio over the heads,
            the slowest first: half-lives of 693 down to 1.7 positions, of 693 with one head. paper: as in Mamba-2
            (arXiv 2405.21060) rates drawn evenly from 1..16 and steps, by their logarithms, from 0.001..0.1. With these
            it is luck whether a model of one head can remember the beginning of a sequence; and one that forgets slowly
            learns recall sooner.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = AUTO_RULE
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})
    has_order: ClassVar[bool] = True
    needs_qk_norm: ClassVar[bool] = True
    needs_output_norm: ClassVar[bool] = True
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

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
        output_gate: Gate = "silu",
        negative_eigenvalues: bool = False,
        decay_init: DecayInit = "spread",
    ) -> None:
        super().__init__()
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.value_width = round(head_width * value_expansion)
        if self.value_width < 1 or self.value_width != head_width * value_expansion:
            raise UserError(
                f"attn.value_expansion={value_expansion}: times head_width={head_width} must be a whole number"
            )
        self.backend = "torch" if backend == "auto" else backend
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.qk_norm, self.max_beta = qk_norm, 2 if negative_eigenvalues else 1
        key_width, width = self.num_heads * head_width, self.num_heads * self.value_width
        self.query_key_value = QueryKeyValue(dim, key_width, key_width, width, conv_size=conv_size, activation=True)
        self.decay = Projection(dim, self.num_heads)
        self.beta = Projection(dim, self.num_heads)
        self.log_decay_rate = nn.Parameter(torch.empty(self.num_heads))
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))
        self.positions = RotaryPositions(head_width, rotary_theta)
        self.norm = head_norm(self.value_width, output_norm)
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what `choose_delta_rule` refuses."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        width = options.get("head_width")
        return choose_delta_rule(
            options.get("backend", "auto"),
            widths=None if width is None else (width, width * options.get("value_expansion", 1)),
            device_type=device_type,
            precision=precision,
        )

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `value_expansion`, for whole numbers of value channels a head up to the model's width."""
        key_width = options.get("head_width", head_width)
        return [
            {"value_expansion": width // key_width if width % key_width == 0 else width / key_width}
            for width in range(1, dim + 1)
            # What the constructor asks of it; a quotient that floating point cannot undo is left out.
            if key_width * (width / key_width) == width
        ]

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set rates and time steps as `decay_init` has it."""
        init_decay(self.log_decay_rate, self.decay_bias, self.decay_init, generator)

    def forward(
        self, x_BTD: Tensor, state: GatedDeltaNetState | None = None
    ) -> tuple[Tensor, GatedDeltaNetState | None]:
        history, memory = (None, None) if state is None else (state.history_BWC, state.memory_BHKV)
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        if self.backend == "triton":
            packed_BTC, gates = self.query_key_value.packed(x_BTD, history), self._gates(x_BTD)
            if angles is not None:
                packed_BTC = rotate_packed(packed_BTC, angles, 2 * self.num_heads)
            mixed_BTHV, last_memory = packed_gated_delta_rule(packed_BTC, *gates, memory, self.head_width, self.qk_norm)
        else:
            mixed_BTHV, last_memory = gated_delta_rule(*self._inputs(x_BTD, history, angles), memory, self.backend)
        if state is not None:
            state.position.add_(x_BTD.shape[1])
            if last_memory is not None:
                state.memory_BHKV.copy_(last_memory)
        return self._finish(mixed_BTHV, x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        inputs = self._inputs(x_BTD, None, self.positions(x_BTD, 0))
        shape = (x_BTD.shape[0], self.num_heads, self.head_width, self.value_width)
        mixed_BTHV, _ = recurrent_gated_delta_rule(*inputs, inputs[3].new_zeros(shape))
        return self._finish(mixed_BTHV, x_BTD)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return self._gates(x_BTD)[0]

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> GatedDeltaNetState:
        shape = (batch_size, self.num_heads, self.head_width, self.value_width)
        device = self.decay.weight.device
        return GatedDeltaNetState(
            memory_BHKV=torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
            position=self.positions.init_position(device),
        )

    def mixing_flops(self, length: int) -> int:
        return delta_rule_flops(length, self.num_heads, self.head_width, self.value_width)

    def _inputs(
        self, x_BTD: Tensor, history_BWC: Tensor | None, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, log decay and beta of every position."""
        query, key, value = self.query_key_value(x_BTD, history_BWC)
        (query, key), (value,) = by_heads((query, key), self.head_width), by_heads((value,), self.value_width)
        query, key = rotate_both(query, key, angles)
        scale = self.head_width**-0.5
        query = unit_length(query, scale) if self.qk_norm else query * scale
        key = unit_length(key) if self.qk_norm else key
        return query, key, value, *self._gates(x_BTD)

    def _gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log decay and beta of every position, in float32 at least."""
        dtype = accumulation_dtype(x_BTD.dtype)
        if x_BTD.shape[1] > 1:
            # One product: by themselves both are too narrow for a GPU's matrix units.
            both_BTH = F.linear(x_BTD, torch.cat([self.decay.weight, self.beta.weight])).to(dtype)
            decay_BTH, beta_BTH = both_BTH.chunk(2, dim=-1)
        else:
            # As in FeedForward: autocast keeps the cast weights of both, and a step casts none again.
            decay_BTH, beta_BTH = self.decay(x_BTD).to(dtype), self.beta(x_BTD).to(dtype)
        decay_BTH = softplus_decay(decay_BTH, self.log_decay_rate, self.decay_bias)
        return decay_BTH, self.max_beta * beta_BTH.sigmoid()

    def _finish(self, mixed_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).flatten(2), x_BTD)
