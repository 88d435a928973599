"""Shared part of the mixers over the delta rule: from an input to the operator's, and from its output back."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import Mixer, expanded, expansions, head_count
from attnbench.mixers.decay import DecayInit, init_decay, softplus_decay
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.delta.delta_rule import (
    AUTO_RULE,
    choose_delta_rule,
    gated_delta_rule,
    packed_gated_delta_rule,
    recurrent_gated_delta_rule,
    unit_length,
)
from attnbench.ops.layers.rotary import rotate_both, rotate_packed
from attnbench.settings.check import check_value


class DeltaRuleState(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class DeltaRuleMixer(Mixer):
    """Mixer whose recurrence is the operator of ops/delta/delta_rule.py; options are named as in `GatedDeltaNet`.

    Query, key and value come through a short convolution and SiLU, b_t = max_beta sigmoid(beta(x_t)).

    Args:
        max_beta: largest b_t.
        decay_init: initial values of `log_decay_rate` and `decay_bias`, see mixers/decay.py; None for no decay.
        num_steps: sub-steps a position, each with a key, a value and a strength of its own.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = AUTO_RULE
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    has_order: ClassVar[bool] = True
    needs_qk_norm: ClassVar[bool] = True
    needs_output_norm: ClassVar[bool] = True
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None,
        value_expansion: float,
        backend: str,
        rotary_theta: float | None,
        conv_size: int,
        qk_norm: bool,
        output_norm: bool,
        output_gate: Gate,
        max_beta: float = 1,
        decay_init: DecayInit | None = None,
        num_steps: int = 1,
    ) -> None:
        super().__init__()
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.value_width = expanded(head_width, value_expansion)
        self.backend = self.known_backend(backend)
        if decay_init is not None:
            check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit | None = decay_init
        self.qk_norm, self.max_beta, self.num_steps = qk_norm, max_beta, num_steps
        key_width, width = self.num_heads * head_width, self.num_heads * self.value_width
        self.query_key_value = QueryKeyValue(
            dim,
            key_width,
            num_steps * key_width,
            num_steps * width,
            conv_size=conv_size,
            activation=self.activates({"conv_size": conv_size}),
        )
        if decay_init is not None:
            self.decay = Projection(dim, self.num_heads)
            self.log_decay_rate = nn.Parameter(torch.empty(self.num_heads))
            self.decay_bias = nn.Parameter(torch.empty(self.num_heads))
        self.beta = Projection(dim, num_steps * self.num_heads)
        self.positions = RotaryPositions(head_width, rotary_theta)
        self.norm = head_norm(self.value_width, output_norm)
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return True

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
        """Vary `value_expansion`."""
        return expansions(options, dim=dim, head_width=head_width)

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set rates and time steps as `decay_init` has it."""
        if self.decay_init is not None:
            init_decay(self.log_decay_rate, self.decay_bias, self.decay_init, generator)

    def forward(self, x_BTD: Tensor, state: DeltaRuleState | None = None) -> tuple[Tensor, DeltaRuleState | None]:
        history, memory = (None, None) if state is None else (state.history_BWC, state.memory_BHKV)
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        if self.backend == "triton":
            packed = self._packed(x_BTD, history, angles)
            mixed_BTHV, last_memory = packed_gated_delta_rule(*packed, memory, self.head_width, self.qk_norm)
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

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        return None if self.decay_init is None else self._gates(x_BTD)[0]

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> DeltaRuleState:
        shape = (batch_size, self.num_heads, self.head_width, self.value_width)
        device = self.beta.weight.device
        return DeltaRuleState(
            memory_BHKV=torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
            position=self.positions.init_position(device),
        )

    def _inputs(
        self, x_BTD: Tensor, history_BWC: Tensor | None, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, log decay and beta of every position; of key, value and beta those of its sub-steps
        one after the other."""
        query, key, value = self.query_key_value(x_BTD, history_BWC)
        (query, key), (value,) = by_heads((query, key), self.head_width), by_heads((value,), self.value_width)
        query, key = rotate_both(query, key, angles)
        scale = self.head_width**-0.5
        query = unit_length(query, scale) if self.qk_norm else query * scale
        key = unit_length(key) if self.qk_norm else key
        return query, self._by_sub_steps(key), self._by_sub_steps(value), *self._gates(x_BTD)

    def _packed(
        self, x_BTD: Tensor, history_BWC: Tensor | None, angles: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for our kernels, which norm by themselves: query, key and value side by side, (B, T, C), log
        decay and beta."""
        packed_BTC, gates = self.query_key_value.packed(x_BTD, history_BWC), self._gates(x_BTD)
        if angles is not None:
            packed_BTC = rotate_packed(packed_BTC, angles, (1 + self.num_steps) * self.num_heads)
        return packed_BTC, *gates

    def _gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log decay of every position and beta of every sub-step, in float32 at least."""
        dtype = accumulation_dtype(x_BTD.dtype)
        if self.decay_init is None:
            beta_BTC = self.beta(x_BTD).to(dtype)
            log_decay_BTH = beta_BTC.new_zeros(*x_BTD.shape[:2], self.num_heads)
        else:
            decay_BTH, beta_BTC = (part.to(dtype) for part in self._decay_and_beta(x_BTD))
            log_decay_BTH = softplus_decay(decay_BTH, self.log_decay_rate, self.decay_bias)
        return log_decay_BTH, self._by_sub_steps(self.max_beta * beta_BTC.sigmoid())

    def _decay_and_beta(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        if x_BTD.shape[1] == 1:
            # As in FeedForward: autocast keeps the cast weights of both, and a step casts none again.
            return self.decay(x_BTD), self.beta(x_BTD)
        # One product: by themselves both are too narrow for a GPU's matrix units.
        both_BTC = F.linear(x_BTD, torch.cat([self.decay.weight, self.beta.weight]))
        return both_BTC.tensor_split((self.num_heads,), dim=-1)

    def _by_sub_steps(self, x_BTC: Tensor) -> Tensor:
        """Lay the heads of all sub-steps, (B, T, nH, ...), out as the operator takes them, (B, nT, H, ...)."""
        if self.num_steps == 1:
            return x_BTC
        return x_BTC.unflatten(2, (self.num_steps, self.num_heads)).flatten(1, 2)

    def _finish(self, mixed_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).flatten(2), x_BTD)
