"""Base of the mixers whose memory only decays, by a number a head; see ops/scalar/scalar_decay.py."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import Mixer, State
from attnbench.ops.common.precision import accumulation_dtype, at_least_float32
from attnbench.ops.layers.rotary import rotate_both, rotate_packed
from attnbench.ops.scalar.scalar_decay import (
    AUTO_RULE,
    choose_scalar_decay,
    packed_scalar_decay,
    recurrent_scalar_decay,
    scalar_decay,
)
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError


class DecayState(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class DecayedAttention(Mixer):
    """S_t = a_t S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t, per head, with S_0 = 0. A mixer says by `gates` how fast its
    memory decays and how strongly it writes.

    Args:
        key_width, value_width: channels a head, K and V.
        shares_keys: one query and one key serve all heads.
        scale: factor of the query.
    """

    is_packed: ClassVar[bool] = True
    """True where our kernels read query, key and value from where projection and convolution made them: where `project`
    and `mix` are those of this class, and no norm lies between."""

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = AUTO_RULE
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    has_order: ClassVar[bool] = True
    needs_output_norm: ClassVar[bool] = True
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        *,
        shares_keys: bool = False,
        scale: float = 1.0,
        backend: str,
        rotary_theta: float | None,
        conv_size: int,
        qk_norm: bool,
        output_norm: bool,
        output_gate: Gate,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_width, self.value_width, self.scale = num_heads, key_width, value_width, scale
        self.backend, self.qk_norm = self.known_backend(backend), qk_norm
        keys, width = key_width if shares_keys else num_heads * key_width, num_heads * value_width
        activation = self.activates({"conv_size": conv_size})
        self.query_key_value = QueryKeyValue(dim, keys, keys, width, conv_size=conv_size, activation=activation)
        self.query_norm, self.key_norm = head_norm(key_width, qk_norm), head_norm(key_width, qk_norm)
        self.positions = RotaryPositions(key_width, rotary_theta)
        self.norm = head_norm(value_width, output_norm)
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what `choose_scalar_decay` refuses."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        widths = None if options.get("head_width") is None else cls.widths(options)
        return choose_scalar_decay(options.get("backend", "auto"), widths=widths, device_type=device_type)

    @classmethod
    def widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        """Return the key and value channels a head that the operator gets."""
        return options["head_width"], options["head_width"] * options.get("value_expansion", 1)

    def gates(self, x_BTD: Tensor) -> tuple[Any, ...]:
        """Return, in float32 at least, log a_t of every position, (B, T, H), of a batch of 1 where all have the same;
        and the weight of what it writes, (B, T, H), None for 1: what `mix` and `define` take after the value."""
        raise NotImplementedError

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log a_t of every position, (B, T, H)."""
        return self.gates(x_BTD)[0].expand(*x_BTD.shape[:2], -1)

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        if self.backend == "triton" and self.is_packed and not self.qk_norm:
            mixed_BTHV, value_BTHV = self._mix_packed(x_BTD, state)
        else:
            query_BTGK, key_BTGK, value_BTHV = self.project(x_BTD, state)
            mixed_BTHV = self.mix(query_BTGK, key_BTGK, value_BTHV, *self.gates(x_BTD), state=state)
        if state is not None:
            state.position.add_(x_BTD.shape[1])
        return self.finish(mixed_BTHV, value_BTHV, x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        query_BTGK, key_BTGK, value_BTHV = self.project(x_BTD, None)
        mixed_BTHV = self.define(query_BTGK, key_BTGK, value_BTHV, *self.gates(x_BTD))
        return self.finish(mixed_BTHV, value_BTHV, x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> State:
        device = self.output.projection.weight.device
        shape = (batch_size, self.num_heads, self.key_width, self.value_width)
        return DecayState(
            memory_BHKV=torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
            position=self.positions.init_position(device),
        )

    def project(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value by heads: normed, rotated, the query scaled."""
        query, key, value = self.query_key_value(x_BTD, None if state is None else state.history_BWC)
        (query, key), (value,) = by_heads((query, key), self.key_width), by_heads((value,), self.value_width)
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        query, key = rotate_both(self.query_norm(query), self.key_norm(key), angles)
        return query * self.scale, key, value

    def mix(
        self,
        query_BTGK: Tensor,
        key_BTGK: Tensor,
        value_BTHV: Tensor,
        log_decay_BTH: Tensor,
        write_BTH: Tensor | None,
        state: State | None,
    ) -> Tensor:
        """Return S_t^T q_t of every head, (B, T, H, V), and update the memory in a state."""
        memory_BHKV = None if state is None else state.memory_BHKV
        inputs = (query_BTGK, key_BTGK, weighted(value_BTHV, write_BTH), log_decay_BTH)
        mixed_BTHV, last_BHKV = scalar_decay(*inputs, memory_BHKV, self.backend)
        if state is not None and last_BHKV is not None:
            state.memory_BHKV.copy_(last_BHKV)
        return mixed_BTHV

    def _mix_packed(self, x_BTD: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
        """Compute the same by our kernels, from where the projection lies; return the value's heads too."""
        history, memory = (None, None) if state is None else (state.history_BWC, state.memory_BHKV)
        packed_BTC = self.query_key_value.packed(x_BTD, history)
        num_groups = self.query_key_value.widths[0] // self.key_width
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        if angles is not None:
            packed_BTC = rotate_packed(packed_BTC, angles, 2 * num_groups)
        log_decay_BTH, write_BTH = self.gates(x_BTD)
        shape = (num_groups, self.key_width, self.scale)
        mixed_BTHV, last_BHKV = packed_scalar_decay(packed_BTC, log_decay_BTH, write_BTH, None, memory, *shape)
        if state is not None and last_BHKV is not None:
            state.memory_BHKV.copy_(last_BHKV)
        value_BTC = packed_BTC[..., -self.num_heads * self.value_width :]
        return mixed_BTHV, value_BTC.unflatten(-1, (self.num_heads, -1))

    def define(
        self,
        query_BTGK: Tensor,
        key_BTGK: Tensor,
        value_BTHV: Tensor,
        log_decay_BTH: Tensor,
        write_BTH: Tensor | None,
    ) -> Tensor:
        """Compute the same without a state by the definition."""
        shape = (value_BTHV.shape[0], self.num_heads, self.key_width, self.value_width)
        inputs = (query_BTGK, key_BTGK, weighted(value_BTHV, write_BTH), log_decay_BTH)
        return recurrent_scalar_decay(*inputs, log_decay_BTH.new_zeros(shape))[0]

    def finish(self, mixed_BTHV: Tensor, value_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Norm, gate and project the output of the heads, which may be wider than the value's dtype; (B, T, D)."""
        return self.output(self.norm(mixed_BTHV).to(value_BTHV.dtype).flatten(2), x_BTD)


def weighted(value_BTHV: Tensor, write_BTH: Tensor | None) -> Tensor:
    """Return the value times the weight that its position is written with; keeps the dtype."""
    return value_BTHV if write_BTH is None else (value_BTHV * write_BTH[..., None]).to(value_BTHV.dtype)


def add_skip(mixed_BTHV: Tensor, value_BTHV: Tensor, skip_H: Tensor) -> Tensor:
    """Return y + skip v, in float32 at least: at a norm most of what its gradient says of the skip cancels."""
    return mixed_BTHV + at_least_float32(value_BTHV) * skip_H[:, None]


def check_state_width(state_width: int, rotary_theta: float | None, minimum: int = 1) -> None:
    """Raise UserError for key channels that a head cannot have."""
    check_value("attn.state_width", state_width, minimum=minimum)
    if rotary_theta is not None and state_width % 2:
        raise UserError(
            f"attn.state_width={state_width}, attn.rotary_theta={rotary_theta}: rotary positions need an even width; "
            "attn.rotary_theta=null leaves them out"
        )


def state_widths(options: dict[str, Any], *, dim: int, minimum: int = 1) -> list[dict[str, Any]]:
    """Return `state_choices` of a mixer whose state_width decides: up to the model's width."""
    step = 1 if options.get("rotary_theta") is None else 2
    return [{"state_width": width} for width in range(max(step, minimum), dim + 1, step)]
