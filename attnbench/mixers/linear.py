"""Linear attention: softmax's weights replaced by a product of features, so that the past fits into one matrix."""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.mixers.base import State
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.linear.linear_attention import LINEAR_ATTENTION, feature
from attnbench.settings.options import option


class LinearState(NamedTuple):
    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    history_BWC: Tensor
    position: Tensor


class LinearAttention(RecurrentMixer):
    """Linear attention with a normaliser (Katharopoulos et al., 2020; arXiv 2006.16236), per head, with a
    feature map f:

        S_t = S_{t-1} + f(k_t) v_t^T,   z_t = z_{t-1} + f(k_t),   y_t = S_t^T f(q_t) / (f(q_t) . z_t + eps)

    Rotary positions turn the features in S alone (Su et al., 2021, eq. 19): turned features are negative too, and their
    sum in z could vanish.
    """

    operator, state_class = LINEAR_ATTENTION, LinearState
    value_expansion: ClassVar[float] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    feature_map: Literal["elu", "relu", "softmax"] = option(
        "elu", "elu (elu + 1) | relu | softmax (over the head's channels; Shen et al., 2021)", after="backend"
    )
    rotary_theta: float | None = option(
        None, "base of rotary positions, on features and in the numerator alone; null: none"
    )
    qk_norm: bool = option(False, "RMS norm of each head's query and key, before the feature map")

    has_order = False
    needs_output_norm = False

    @property
    def is_packed(self) -> bool:
        return True

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `head_width`, a divisor of the model's width unless num_heads is given."""
        free = options.get("num_heads") is not None
        return [{"head_width": width} for width in range(1, dim + 1) if free or dim % width == 0]

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Any, ...], Tensor]:
        query, key, value = self.split_heads(x_BTD, None if state is None else state.history_BWC)
        query, key = self.query_norm(query), self.key_norm(key)
        return (feature(query, self.feature_map), feature(key, self.feature_map), value, angles), x_BTD

    def packed_inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[Any, ...]:
        """Return query, key and value side by side, the angles, and the feature map that our kernel applies."""
        if not self.qk_norm and self.feature_map != "softmax":
            history_BWC = None if state is None else state.history_BWC
            return self.query_key_value.packed(x_BTD, history_BWC), angles, self.feature_map
        features = self.inputs(x_BTD, state, angles)[0][:3]
        return torch.cat([part.flatten(2) for part in features], dim=-1), angles, "identity"
