"""Base of the mixers whose memory decays by a number for every key channel; see ops/diagonal/diagonal_decay.py."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import Mixer, expanded, expansions, head_count
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import (
    AUTO_RULE,
    DiagonalInputs,
    choose_diagonal_decay,
    diagonal_decay,
    recurrent_diagonal_decay,
)


class DiagonalState(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class DiagonalMixer(Mixer):
    """All but `_inputs`, which makes the recurrence's inputs of x: backends, state, and the parts around.

    With rotary positions the two channels that are turned together have one decay, the geometric mean of theirs: by
    different ones a query and a key would meet by where they stand, not by how far apart.

    Args:
        value_expansion: channels of value a head, V, as a multiple of head_width, K.
        rotary_theta, conv_size, output_norm, output_gate: as in attnbench.mixers.around.
        gate_rank: of the output gate, a product of two narrow matrices; None: one of full rank.
        norm_eps: added to the mean square in the output norm.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = AUTO_RULE
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    has_order: ClassVar[bool] = True
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
        output_norm: bool,
        output_gate: Gate,
        gate_rank: int | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.value_width = expanded(head_width, value_expansion)
        self.backend = self.known_backend(backend)
        key_width, width = self.num_heads * head_width, self.num_heads * self.value_width
        activation = self.activates({"conv_size": conv_size})
        self.query_key_value = QueryKeyValue(
            dim, key_width, key_width, width, conv_size=conv_size, activation=activation
        )
        self.positions = RotaryPositions(head_width, rotary_theta)
        self.norm = head_norm(self.value_width, output_norm, norm_eps)
        self.output = GatedOutput(dim, width, gate=output_gate, gate_rank=gate_rank)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what `choose_diagonal_decay` refuses."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        width = options.get("head_width")
        return choose_diagonal_decay(
            options.get("backend", "auto"),
            widths=None if width is None else (width, width * options.get("value_expansion", 1)),
            device_type=device_type,
        )

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `value_expansion`."""
        return expansions(options, dim=dim, head_width=head_width)

    @abstractmethod
    def _inputs(
        self, x_BTD: Tensor, state: DiagonalState | None, angles: Tensor | None
    ) -> tuple[DiagonalInputs, Tensor]:
        """Return the recurrence's inputs of every position, the query scaled, and what the output gate reads, (B, T,
        D); update what a state keeps of x."""

    def forward(self, x_BTD: Tensor, state: DiagonalState | None = None) -> tuple[Tensor, DiagonalState | None]:
        inputs, gate_BTD = self._inputs(x_BTD, state, self.positions(x_BTD, 0 if state is None else state.position))
        mixed_BTHV, last_memory = diagonal_decay(inputs, None if state is None else state.memory_BHKV, self.backend)
        if state is not None:
            state.position.add_(x_BTD.shape[1])
            if last_memory is not None:
                state.memory_BHKV.copy_(last_memory)
        return self._finish(mixed_BTHV, inputs, gate_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        inputs, gate_BTD = self._inputs(x_BTD, None, self.positions(x_BTD, 0))
        shape = (x_BTD.shape[0], self.num_heads, self.head_width, self.value_width)
        mixed_BTHV, _ = recurrent_diagonal_decay(inputs, inputs.log_decay_BTHK.new_zeros(shape))
        return self._finish(mixed_BTHV, inputs, gate_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> DiagonalState:
        shape = (batch_size, self.num_heads, self.head_width, self.value_width)
        device = self.output.projection.weight.device
        return DiagonalState(
            memory_BHKV=torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
            position=self.positions.init_position(device),
        )

    def _heads(self, x_BTD: Tensor | Sequence[Tensor], state: DiagonalState | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value by heads, before norms and positions; see QueryKeyValue."""
        query, key, value = self.query_key_value(x_BTD, None if state is None else state.history_BWC)
        (query, key), (value,) = by_heads((query, key), self.head_width), by_heads((value,), self.value_width)
        return query, key, value

    def _finish(self, mixed_BTHV: Tensor, inputs: DiagonalInputs, gate_BTD: Tensor) -> Tensor:
        """Norm, gate and project the output of the heads, (B, T, D)."""
        return self.output(self.norm(mixed_BTHV).flatten(2), gate_BTD)

    def _in_pairs(self, x_BTHK: Tensor) -> Tensor:
        """Return x, with rotary positions the mean of the two channels that are turned together in both of them."""
        if self.positions.theta is None:
            return x_BTHK
        return x_BTHK.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, dim=-1)
