"""Linear attention: softmax's weights replaced by a product of features, so that the past fits into one matrix."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbench.mixers.around import Gate, GatedOutput, QueryKeyValue, RotaryPositions, by_heads, head_norm
from attnbench.mixers.base import Mixer, head_count
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.linear.linear_attention import (
    AUTO_RULE,
    FEATURE_MAPS,
    choose_linear,
    feature,
    linear_attention,
    linear_attention_flops,
    packed_linear_attention,
    recurrent_linear_attention,
)
from attnbench.settings.errors import UserError


class LinearState(NamedTuple):
    """Memory of the past; its size does not depend on the length."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class LinearAttention(Mixer):
    """Linear attention with a normaliser (Katharopoulos et al., 2020; arXiv 2006.16236), per head:

        S_t = S_{t-1} + f(k_t) v_t^T,   z_t = z_{t-1} + f(k_t),   y_t = S_t^T f(q_t) / (f(q_t) . z_t + eps)

    With rotary positions S is written and read by the turned features R_t f(k_t) and R_t f(q_t) (Su et al., 2021, eq.
    19). In z they stay as they are: turned ones are negative too, and a sum of theirs can vanish.

    Args:
        num_heads: null for dim / head_width; the inner width is num_heads × head_width.
        head_width: channels of query, key and value a head.
        backend: auto | torch | triton | fla. Triton is this bench's own kernel, for CUDA and a head_width of 16 to 128;
            auto takes it there and torch elsewhere. Changes the speed, not the result beyond rounding.
        feature_map: f, non-negative: elu (elu(x) + 1), relu, or softmax over the head's channels (Shen et al., 2021).
        rotary_theta: base of the rotary positions' wavelengths; null for no positions.
        conv_size: taps of a short convolution over query, key and value; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain, before the feature map.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.

    Raises:
        UserError: a feature map that does not exist; what its parts refuse.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton", "fla")
    auto_rule: ClassVar[str] = AUTO_RULE
    without_vmap: ClassVar[frozenset[str]] = frozenset({"fla"})
    state_memory: ClassVar[tuple[str, ...]] = ("memory_BHKV",)

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        backend: str = "auto",
        feature_map: str = "elu",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = False,
        output_gate: Gate = "none",
    ) -> None:
        super().__init__()
        if feature_map not in FEATURE_MAPS:
            raise UserError(f"attn.feature_map={feature_map}: must be one of {', '.join(FEATURE_MAPS)}")
        self.head_width, self.num_heads = head_width, head_count(num_heads, dim, head_width)
        self.backend = self.known_backend(backend)
        self.feature_map, self.qk_norm = feature_map, qk_norm
        width = self.num_heads * head_width
        self.query_key_value = QueryKeyValue(dim, width, width, width, conv_size=conv_size)
        self.query_norm, self.key_norm = head_norm(head_width, qk_norm), head_norm(head_width, qk_norm)
        self.positions = RotaryPositions(head_width, rotary_theta)
        self.norm = head_norm(head_width, output_norm)
        self.output = GatedOutput(dim, width, gate=output_gate)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what `choose_linear` refuses."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        return choose_linear(
            options.get("backend", "auto"), head_width=options.get("head_width"), device_type=device_type
        )

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `head_width`, a divisor of the model's width where the number of heads follows from it."""
        free = options.get("num_heads") is not None
        return [{"head_width": width} for width in range(1, dim + 1) if free or dim % width == 0]

    def forward(self, x_BTD: Tensor, state: LinearState | None = None) -> tuple[Tensor, LinearState | None]:
        mix = self._mix_packed if self.backend == "triton" else self._mix
        mixed_BTHV, memory_BHKV, normaliser_BHK = mix(x_BTD, state)
        if state is not None:
            state.memory_BHKV.copy_(memory_BHKV)
            state.normaliser_BHK.copy_(normaliser_BHK)
            state.position.add_(x_BTD.shape[1])
        return self._finish(mixed_BTHV, x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self._finish(recurrent_linear_attention(*self._features(x_BTD, None), self.positions(x_BTD, 0)), x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> LinearState:
        device, width = self.output.projection.weight.device, self.head_width
        shape, state_dtype = (batch_size, self.num_heads, width, width), accumulation_dtype(dtype)
        return LinearState(
            memory_BHKV=torch.zeros(shape, dtype=state_dtype, device=device),
            normaliser_BHK=torch.zeros(shape[:3], dtype=state_dtype, device=device),
            history_BWC=self.query_key_value.init_history(batch_size, dtype),
            position=self.positions.init_position(device),
        )

    def mixing_flops(self, length: int) -> int:
        return linear_attention_flops(length, self.num_heads, self.head_width)

    def _features(self, x_BTD: Tensor, history_BWC: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return f(query), f(key) and value, each (B, T, H, head_width)."""
        query, key, value = by_heads(self.query_key_value(x_BTD, history_BWC), self.head_width)
        query, key = self.query_norm(query), self.key_norm(key)
        return feature(query, self.feature_map), feature(key, self.feature_map), value

    def _mix(self, x_BTD: Tensor, state: LinearState | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y of every head, the last memory and the last normaliser."""
        inputs = self._features(x_BTD, None if state is None else state.history_BWC)
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        memory, normaliser = (None, None) if state is None else state[:2]
        return linear_attention(*inputs, memory, normaliser, angles, self.backend)

    def _mix_packed(self, x_BTD: Tensor, state: LinearState | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the same by our kernel, which reads the projection where it is, and takes f too where nothing is
        between."""
        history = None if state is None else state.history_BWC
        if not self.qk_norm and self.feature_map != "softmax":
            mixed_BTC, feature_map = self.query_key_value.packed(x_BTD, history), self.feature_map
        else:
            mixed_BTC = torch.cat([part.flatten(2) for part in self._features(x_BTD, history)], dim=-1)
            feature_map = "identity"
        memory, normaliser = (None, None) if state is None else state[:2]
        angles = self.positions(x_BTD, 0 if state is None else state.position)
        return packed_linear_attention(mixed_BTC, memory, normaliser, angles, self.num_heads, feature_map)

    def _finish(self, mixed_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(mixed_BTHV).flatten(2), x_BTD)
